"""The demo's short check of the ops on small shapes, each against an oracle of the same values.

Attention is judged by `tritonattn.compare` against fp64, beside eager torch in the same dtype.
Ops that only move bytes must move exactly the right ones: their oracle is plain indexing, over
the whole cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonattn.block_ops import copy_blocks, reshape_and_cache
from tritonattn.cases import AttentionCase, make_inputs
from tritonattn.diff import DiffReport, compare
from tritonattn.diff.grid import diff_inputs

# The demo model's geometry.
_NUM_QO_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _PAGE_SIZE = 9, 3, 64, 16


@dataclass(frozen=True, slots=True)
class OpCheck:
    """One row of the table."""

    op: str
    case: str
    report: DiffReport

    def row(self) -> str:
        """Return the row as text."""
        report = self.report
        if report.actual_error is None:
            error = f"{report.mismatch_count} of {report.numel} wrong"
        else:
            error = f"{report.actual_error.max_abs:.1e}"
        verdict = report.verdict if report.passed else "FAILED"
        return f"  {self.op:<12}{self.case:<48}{error:>20}  {verdict}"


HEADER = f"  {'op':<12}{'case':<48}{'largest error':>20}  verdict"


def check_ops(device: str, dtype: torch.dtype) -> Iterator[OpCheck]:
    """Run decode, prefill, append and copy_blocks; yield each with its report."""
    yield _attention("decode", (1, 1, 1), (40, 17, 3), device, dtype)
    yield _attention("prefill", (20, 11), (33, 11), device, dtype)
    yield _append(device, dtype)
    yield _copy_blocks(device, dtype)


def _attention(
    op: str, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], device: str, dtype: torch.dtype
) -> OpCheck:
    case = AttentionCase(
        q_lens, kv_lens, _NUM_QO_HEADS, _NUM_KV_HEADS, _HEAD_DIM, page_size=_PAGE_SIZE, dtype=dtype
    )
    report, _ = diff_inputs(make_inputs(case, device), op, peer="torch")
    lengths = " ".join(f"{q}/{kv}" for q, kv in zip(q_lens, kv_lens, strict=True))
    return OpCheck(op, f"query/key tokens {lengths}, 9/3 heads of 64", report)


def _append(device: str, dtype: torch.dtype) -> OpCheck:
    """Seven new tokens, two of them padding."""
    slots = torch.tensor([37, 0, -1, 15, 16, -1, 80], device=device)
    k, v = _pages(6, device, dtype)
    new = torch.randn(2, slots.numel(), *k.shape[2:], generator=_seeded(device), device=device)
    new = new.to(dtype)
    expected = torch.stack((k, v)).flatten(1, 2)
    expected[:, slots[slots >= 0]] = new[:, slots >= 0]
    reshape_and_cache(new[0], new[1], (k, v), slots)
    return _exact("append", "7 tokens into 6 pages of 16, 2 of them padding", (k, v), expected)


def _copy_blocks(device: str, dtype: torch.dtype) -> OpCheck:
    """Two layers at once."""
    src_to_dst = torch.tensor([[1, 3], [4, 0]])
    layers = [_pages(6, device, dtype, seed) for seed in (0, 1)]
    expected = torch.stack([torch.stack(layer) for layer in layers])
    expected[:, :, src_to_dst[:, 1]] = expected[:, :, src_to_dst[:, 0]]
    copy_blocks(layers, src_to_dst)
    return _exact("copy_blocks", "pages 1 to 3 and 4 to 0, 2 layers", sum(layers, ()), expected)


def _exact(op: str, case: str, actual: tuple[Tensor, ...], expected: Tensor) -> OpCheck:
    """Compare bytes: as integers there is no tolerance, and NaN is a value like any other."""
    as_int = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    stacked = torch.stack(actual).flatten().view(as_int)
    return OpCheck(op, case, compare(stacked, expected.flatten().view(as_int), name=op))


def _pages(num_pages: int, device: str, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    shape = (2, num_pages, _PAGE_SIZE, _NUM_KV_HEADS, _HEAD_DIM)
    pages = torch.randn(shape, generator=_seeded(device, seed), device=device).to(dtype)
    pages[:, 2] = math.nan  # unused memory may hold anything
    k, v = pages.unbind(0)
    return k, v


def _seeded(device: str, seed: int = 0) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)
