"""Arguments of FlashInfer's plan/run classes: dtypes by name, caches without a page dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tritonattn.backends import UnsupportedError
from tritonattn.layout import KVCacheLike
from tritonattn.spec import check_dtypes, check_head_dim, check_heads

DType: TypeAlias = str | torch.dtype


@dataclass(frozen=True, slots=True)
class LayerArguments:
    """What `plan()` fixes for the calls of all layers."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int  # tokens
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    causal: bool
    window_left: int
    logits_soft_cap: float | None
    sm_scale: float | None
    custom_mask: Tensor | None = None

    def masks(self) -> dict[str, Any]:
        """Return the optional arguments of `paged_attention` that stand since `plan()`."""
        return {
            "window_left": self.window_left,
            "logits_soft_cap": self.logits_soft_cap,
            "custom_mask": self.custom_mask,
        }

    @classmethod
    def of(
        cls,
        *,
        q_data_type: DType | None,
        kv_data_type: DType | None,
        o_data_type: DType | None,
        pos_encoding_mode: str,
        **fields: Any,
    ) -> LayerArguments:
        """Make them from `plan()`'s arguments; raise `ValueError`/`TypeError` for bad ones."""
        check_position_encoding(pos_encoding_mode)
        q_dtype = as_dtype("q_data_type", q_data_type)
        kv_dtype = q_dtype if kv_data_type is None else as_dtype("kv_data_type", kv_data_type)
        if o_data_type is not None and as_dtype("o_data_type", o_data_type) != q_dtype:
            raise UnsupportedError(f"o_data_type must be q's dtype {q_dtype}, got {o_data_type}")
        made = cls(q_dtype=q_dtype, kv_dtype=kv_dtype, **fields)
        check_heads(made.num_qo_heads, made.num_kv_heads)
        check_head_dim("head_dim of q", made.head_dim_qk)
        check_head_dim("head_dim of v", made.head_dim_vo)
        check_dtypes(q_dtype, kv_dtype)
        return made


def expand_page_dim(paged_kv_cache: KVCacheLike, kv_layout: str) -> KVCacheLike:
    """Add the dimension of page size 1 that FlashInfer lets callers leave out."""
    dim = -3 if kv_layout == "NHD" else -2
    if isinstance(paged_kv_cache, Tensor):
        return paged_kv_cache.unsqueeze(dim) if paged_kv_cache.dim() == 4 else paged_kv_cache
    if isinstance(paged_kv_cache, tuple) and all(
        isinstance(t, Tensor) and t.dim() == 3 for t in paged_kv_cache
    ):
        return tuple(t.unsqueeze(dim) for t in paged_kv_cache)  # type: ignore[return-value]
    return paged_kv_cache


def check_kv_dtype(cache: KVCacheLike, planned: torch.dtype) -> None:
    """Raise `ValueError` if the cache has another dtype than planned."""
    for part in cache if isinstance(cache, tuple) else (cache,):
        if isinstance(part, Tensor) and part.dtype != planned:
            raise ValueError(
                f"paged_kv_cache must have the planned kv_data_type {planned}, got {part.dtype}"
            )


def as_dtype(name: str, dtype: DType | None) -> torch.dtype:
    """Return a dtype given by itself or by its name in torch."""
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype or its name, got {dtype!r}")
    return named


def check_position_encoding(pos_encoding_mode: str) -> None:
    """Raise unless positions are not encoded inside the kernel."""
    if pos_encoding_mode in ("ROPE_LLAMA", "ALIBI"):
        raise UnsupportedError(
            f"pos_encoding_mode={pos_encoding_mode!r} is not supported: encode q and k beforehand"
        )
    if pos_encoding_mode != "NONE":
        raise ValueError(f"pos_encoding_mode must be 'NONE', got {pos_encoding_mode!r}")
