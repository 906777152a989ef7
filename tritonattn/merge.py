"""Merge of attention states, with FlashInfer's names and arguments.

A state is what attention of some queries over some keys gave: `v`, the output, and `s`, the base-2
log-sum-exp of its scaled logits (`return_lse=True`). States over disjoint keys merge into the state
over all of them. A state with s = -inf saw no key: its v may hold anything, and merging only such
states gives 0 and -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritonattn.implementations import implementation


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two states of the same queries.

    Parameters
    ----------
    v_a, v_b : Tensor, shape [n, num_heads, head_dim], float16, bfloat16 or float32
    s_a, s_b : Tensor, shape [n, num_heads], float32
        Base 2. Other float dtypes are converted.

    Returns
    -------
    v : Tensor, shape [n, num_heads, head_dim]
    s : Tensor, shape [n, num_heads], float32
    """
    _check_v("v_a", v_a, 3)
    _check_like("v_b", v_b, v_a)
    s_a, s_b = _as_lse("s_a", s_a, v_a), _as_lse("s_b", s_b, v_a)
    v, s = _empty_states(v_a)
    implementation("merge", v_a.device).merge_pair(v_a, s_a, v_b, s_b, v, s)
    return v, s


def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None
) -> None:
    """Merge another state of the same queries into `v` and `s`.

    Parameters
    ----------
    v : Tensor, shape [n, num_heads, head_dim], float16, bfloat16 or float32
    s : Tensor, shape [n, num_heads], float32
        Base 2; written, therefore not converted.
    v_other : Tensor, shape [n, num_heads, head_dim]
    s_other : Tensor, shape [n, num_heads]
    mask : Tensor, shape [n], bool or uint8, optional
        Rows to merge; the others stay untouched. It is read on the device.
    """
    _check_v("v", v, 3)
    _check_like("v_other", v_other, v)
    if isinstance(s, Tensor) and s.dtype != torch.float32:
        raise TypeError(f"s is written in place and must be float32, got {s.dtype}")
    s, s_other = _as_lse("s", s, v), _as_lse("s_other", s_other, v)
    if mask is not None:
        _check_mask(mask, v)
    implementation("merge", v.device).merge_pair(v, s, v_other, s_other, v, s, mask)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge any number of states of the same queries; of none the result is 0 and -inf.

    Parameters
    ----------
    v : Tensor, shape [n, num_states, num_heads, head_dim], float16, bfloat16 or float32
    s : Tensor, shape [n, num_states, num_heads], float32
        Base 2. Other float dtypes are converted.

    Returns
    -------
    v : Tensor, shape [n, num_heads, head_dim]
    s : Tensor, shape [n, num_heads], float32
    """
    _check_v("v", v, 4)
    s = _as_lse("s", s, v)
    v_merged, s_merged = _empty_states(v)
    implementation("merge", v.device).merge_many(v, s, v_merged, s_merged)
    return v_merged, s_merged


def _empty_states(v: Tensor) -> tuple[Tensor, Tensor]:
    shape = (v.size(0), v.size(-2), v.size(-1))
    return v.new_empty(shape), v.new_empty(shape[:2], dtype=torch.float32)


def _check_v(name: str, v: Tensor, ndim: int) -> None:
    if not isinstance(v, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(v).__name__}")
    if v.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"{name} must be float16, bfloat16 or float32, got {v.dtype}")
    if v.dim() != ndim:
        states = "num_states, " if ndim == 4 else ""
        raise ValueError(
            f"{name} must be [n, {states}num_heads, head_dim], got shape {tuple(v.shape)}"
        )
    if v.size(-1) > 1 and v.stride(-1) != 1:
        raise ValueError(f"the last dimension of {name} must have stride 1, got {v.stride(-1)}")


def _check_like(name: str, v: Tensor, other: Tensor) -> None:
    _check_v(name, v, other.dim())
    if v.shape != other.shape:
        raise ValueError(f"{name} must have shape {tuple(other.shape)}, got {tuple(v.shape)}")
    if v.dtype != other.dtype:
        raise TypeError(f"{name} must be {other.dtype} like the other state, got {v.dtype}")
    if v.device != other.device:
        raise ValueError(f"{name} must be on {other.device}, got {v.device}")


def _as_lse(name: str, s: Tensor, v: Tensor) -> Tensor:
    if not isinstance(s, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(s).__name__}")
    if not s.is_floating_point():
        raise TypeError(f"{name} must be float32, got {s.dtype}")
    if s.shape != v.shape[:-1]:
        raise ValueError(f"{name} must have shape {tuple(v.shape[:-1])}, got {tuple(s.shape)}")
    if s.device != v.device:
        raise ValueError(f"{name} must be on {v.device}, got {s.device}")
    return s.to(torch.float32)


def _check_mask(mask: Tensor, v: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a torch.Tensor or None, got {type(mask).__name__}")
    if mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"mask must be bool or uint8, got {mask.dtype}")
    if mask.shape != v.shape[:1]:
        raise ValueError(f"mask must have shape {tuple(v.shape[:1])}, got {tuple(mask.shape)}")
    if mask.device != v.device:
        raise ValueError(f"mask must be on {v.device}, got {mask.device}")
    if mask.size(0) > 1 and mask.stride(0) != 1:
        raise ValueError(f"mask must have stride 1, got {mask.stride(0)}")
