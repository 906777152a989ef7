"""Torch twins of `kernels/merge.py`: same arguments, same outputs, computed in fp64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge_many(v: Tensor, s: Tensor, v_out: Tensor, s_out: Tensor) -> None:
    """Merge the states of dimension 1: a softmax over their LSEs weighs their outputs."""
    s = s.double()
    lse = torch.logsumexp(s * math.log(2.0), dim=1)
    weights = torch.exp2(s - lse.unsqueeze(1) / math.log(2.0))
    used = s > -math.inf
    terms = torch.where(used.unsqueeze(-1), weights.unsqueeze(-1) * v.double(), 0.0)
    v_out.copy_(terms.sum(1))
    s_out.copy_(lse / math.log(2.0))


def merge_pair(
    v_a: Tensor,
    s_a: Tensor,
    v_b: Tensor,
    s_b: Tensor,
    v_out: Tensor,
    s_out: Tensor,
    mask: Tensor | None = None,
) -> None:
    """Merge two states where `mask` is not 0, everywhere without one."""
    v, s = torch.empty_like(v_out), torch.empty_like(s_out)
    merge_many(torch.stack((v_a, v_b), 1), torch.stack((s_a, s_b), 1), v, s)
    rows = torch.ones(v.size(0), dtype=torch.bool, device=v.device) if mask is None else mask != 0
    v_out[rows] = v[rows]
    s_out[rows] = s[rows]
