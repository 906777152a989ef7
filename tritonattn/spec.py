"""The frozen description of one attention call: static, hashable, known without a sync."""

from __future__ import annotations

import numbers
from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_DIM_MIN, HEAD_DIM_MAX, HEAD_DIM_STEP = 16, 256, 8
# By their short names, in case names, files and on the command line.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Q_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a backend needs to accept or refuse a call, to plan it and to size its workspace."""

    device: torch.device
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int  # tokens
    batch_size: int  # requests, padded rows included
    total_q: int  # rows of q, padded rows included
    max_q_len: int  # tokens, an upper bound
    max_kv_len: int  # tokens, an upper bound
    is_csr: bool
    causal: bool
    features: tuple[str, ...] = ()  # optional features that the call asks for, by argument name

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads


def requested_features(
    *,
    kv_dtype: torch.dtype,
    window_left: int = -1,
    logits_soft_cap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    custom_mask: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[str, ...]:
    """Name the optional features in use; an argument at its neutral value asks for nothing."""
    asked = {
        "fp8 KV cache": kv_dtype in FP8_DTYPES,
        "window_left": _number("window_left", window_left) >= 0,
        "logits_soft_cap": _number("logits_soft_cap", logits_soft_cap or 0.0) > 0,
        "alibi_slopes": alibi_slopes is not None,
        "sinks": sinks is not None,
        "custom_mask": custom_mask is not None,
        "k_scale": _scales(k_scale),
        "v_scale": _scales(v_scale),
        "batch_invariant": batch_invariant,
    }
    return tuple(name for name, wanted in asked.items() if wanted)


def _number(name: str, value: object) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    return float(value)


def _scales(scale: float | Tensor | None) -> bool:
    return isinstance(scale, Tensor) or (scale is not None and scale != 1.0)


def is_head_dim(head_dim: int) -> bool:
    """Return whether the library supports `head_dim`."""
    return HEAD_DIM_MIN <= head_dim <= HEAD_DIM_MAX and head_dim % HEAD_DIM_STEP == 0


def check_head_dim(name: str, head_dim: int) -> None:
    """Raise `ValueError` unless `head_dim` is one that the library supports."""
    if not is_head_dim(head_dim):
        raise ValueError(
            f"{name} must be a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_MIN} to {HEAD_DIM_MAX}, "
            f"got {head_dim}"
        )


def check_heads(num_qo_heads: int, num_kv_heads: int) -> None:
    """Raise `ValueError` unless the query heads split evenly over the KV heads."""
    if num_kv_heads < 1 or num_qo_heads < 1 or num_qo_heads % num_kv_heads:
        raise ValueError(
            f"num_qo_heads must be a positive multiple of num_kv_heads, got {num_qo_heads} and "
            f"{num_kv_heads}"
        )


def check_dtypes(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raise `TypeError` unless q and the cache have dtypes that go together."""
    if q_dtype not in Q_DTYPES:
        raise TypeError(f"q must be float16, bfloat16 or float32, got {q_dtype}")
    if kv_dtype != q_dtype and kv_dtype not in FP8_DTYPES:
        raise TypeError(
            f"the cache must have q's dtype {q_dtype} or be float8_e4m3fn or float8_e5m2, "
            f"got {kv_dtype}"
        )
