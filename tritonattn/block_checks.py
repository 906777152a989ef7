"""Checks of block ops and appends, before any launch.

What reads values on the device is called under `TRITONATTN_VALIDATE=1` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonattn import env
from tritonattn.layout import KVCacheLike, PagedKVCache

_INDEX_DTYPES = (torch.int32, torch.int64)


def cache_of(name: str, kv_cache: KVCacheLike, kv_layout: str = "NHD") -> PagedKVCache:
    """View a cache; errors about one of several begin with its name."""
    try:
        cache = PagedKVCache.of(kv_cache, kv_layout)
    except (TypeError, ValueError) as error:
        raise error if name == "kv_cache" else type(error)(f"{name}: {error}") from None
    if cache.k.numel() == 0 or cache.v.numel() == 0:
        _check_page_not_empty(name, cache)
    if cache.device.type not in ("cuda", "cpu"):
        raise ValueError(f"{name} must be on a CUDA (or ROCm) device or a CPU, got {cache.device}")
    if env.INTERPRET and cache.device.type != "cpu":
        raise ValueError(f"{name} must be on a CPU with TRITON_INTERPRET=1, got {cache.device}")
    return cache


def _check_page_not_empty(name: str, cache: PagedKVCache) -> None:
    if 0 in cache.shape[1:]:
        raise ValueError(
            f"{name} must have at least one token, head and element a page, got {cache.shape[1:]} "
            "(page_size, heads, head_dim of k, head_dim of v)"
        )


def layers_of(kv_caches: Sequence[KVCacheLike], name: str = "kv_caches") -> list[PagedKVCache]:
    """View the caches of all layers; they must agree in geometry, dtype and device."""
    if not isinstance(kv_caches, list | tuple):
        raise TypeError(
            f"{name} must be a list of caches, one a layer, got "
            f"{type(kv_caches).__name__}; for one cache pass [kv_cache]"
        )
    if not kv_caches:
        raise ValueError(f"{name} must hold at least one cache, got none")
    if all(isinstance(cache, Tensor) and cache.dim() == 4 for cache in kv_caches):
        raise ValueError(
            f"{name} must be a list of caches, one a layer, got 4-D tensors; for the (k, v) pair "
            "of one layer pass [(k, v)]"
        )
    caches = [cache_of(f"{name}[{i}]", cache) for i, cache in enumerate(kv_caches)]
    for i, cache in enumerate(caches):
        _same(f"{name}[{i}]", cache, f"{name}[0]", caches[0], first_dim=0)
        if cache.device != caches[0].device:
            raise ValueError(
                f"{name} must be on one device, got {cache.device} (layer {i}) and "
                f"{caches[0].device} (layer 0)"
            )
    return caches


def swapped(
    src_kv_cache: KVCacheLike | list[Tensor] | list[tuple[Tensor, Tensor]],
    dst_kv_cache: KVCacheLike | list[Tensor] | list[tuple[Tensor, Tensor]],
) -> tuple[list[PagedKVCache], list[PagedKVCache]]:
    """View both sides of a swap, one layer or a list of all, and check that pages fit."""
    names = ("src_kv_cache", "dst_kv_cache")
    given = (src_kv_cache, dst_kv_cache)
    sources, targets = (
        layers_of(side, name) if isinstance(side, list) else [cache_of(name, side)]
        for name, side in zip(names, given, strict=True)
    )
    same_form = isinstance(src_kv_cache, list) == isinstance(dst_kv_cache, list)
    if not same_form or len(sources) != len(targets):
        raise ValueError(
            "src_kv_cache and dst_kv_cache must be one cache each or lists of as many layers, got "
            f"{len(sources)} and {len(targets)}"
        )
    same_pages(names[0], sources[0], names[1], targets[0])
    return sources, targets


def same_pages(name: str, cache: PagedKVCache, other_name: str, other: PagedKVCache) -> None:
    """Check that pages of one cache fit in the other: dtype and geometry but for their number."""
    _same(name, cache, other_name, other, first_dim=1)


def _same(
    name: str, cache: PagedKVCache, other_name: str, other: PagedKVCache, first_dim: int
) -> None:
    if cache.shape[first_dim:] != other.shape[first_dim:]:
        fields = ("pages", "page_size", "heads", "head_dim of k", "head_dim of v")[first_dim:]
        raise ValueError(
            f"{name} and {other_name} must agree in {', '.join(fields)}, got "
            f"{cache.shape[first_dim:]} and {other.shape[first_dim:]}"
        )
    if cache.dtype != other.dtype:
        raise TypeError(
            f"{name} and {other_name} must have one dtype, got {cache.dtype} and {other.dtype}"
        )


def check_mapping(
    src_to_dst: Tensor,
    num_src_pages: int,
    num_dst_pages: int,
    *,
    one_pool: bool,
    padded: bool = False,
) -> None:
    """Check `[n, 2]` pairs of page ids on the host.

    Parameters
    ----------
    one_pool : bool
        Sources and targets are pages of one pool, so that no page may be both: copies have no
        order.
    padded : bool
        Pairs with a negative id are allowed, and mean nothing.
    """
    if padded:
        src_to_dst = src_to_dst[(src_to_dst >= 0).all(1)]
    if src_to_dst.size(0) == 0:
        return
    for side, column, num_pages in ((0, "source", num_src_pages), (1, "target", num_dst_pages)):
        _check_range(f"src_to_dst names {column} page", src_to_dst[:, side], num_pages)
    src, dst = src_to_dst.unbind(1)
    repeated = _repeated(dst)
    if repeated.numel():
        raise ValueError(
            f"src_to_dst must name each target page once, got page {int(repeated[0])} again"
        )
    if one_pool:
        is_source = torch.zeros(num_src_pages, dtype=torch.bool)
        is_source[src] = True
        chained = dst[is_source[dst]]
        if chained.numel():
            raise ValueError(
                "src_to_dst must not name a page as source and as target, got page "
                f"{int(chained[0])} as both"
            )


def check_mapping_form(src_to_dst: Tensor, allowed: Sequence[torch.device]) -> None:
    """Check type, dtype, shape and device of a mapping."""
    if not isinstance(src_to_dst, Tensor):
        raise TypeError(f"src_to_dst must be a torch.Tensor, got {type(src_to_dst).__name__}")
    if src_to_dst.dtype != torch.int64:
        raise TypeError(f"src_to_dst must be int64, got {src_to_dst.dtype}")
    if src_to_dst.dim() != 2 or src_to_dst.size(1) != 2:
        raise ValueError(
            "src_to_dst must be [n, 2] (source page, target page), got shape "
            f"{tuple(src_to_dst.shape)}"
        )
    _check_device("src_to_dst", src_to_dst, allowed)


def check_block_ids(block_ids: Tensor, cache: PagedKVCache) -> None:
    """Check page ids on the CPU or the cache's device; their values on the CPU only."""
    _check_index("block_ids", block_ids, contiguous=False)
    _check_device("block_ids", block_ids, (torch.device("cpu"), cache.device))
    if block_ids.device.type == "cpu":
        _check_range("block_ids names page", block_ids, cache.num_pages)


def check_padded_ids(block_ids: Tensor, num_pages: int) -> None:
    """Check the values of page ids, negative ones being padding; reads them on the host."""
    block_ids = block_ids.cpu()
    _check_range("block_ids names page", block_ids[block_ids >= 0], num_pages)


def check_not_capturing(name: str, device: torch.device) -> None:
    """Refuse host data within a graph capture: a replay would read whatever is there then."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(f"{name} on the CPU cannot be captured in a CUDA graph")


def check_tokens(
    names: tuple[str, str],
    key: Tensor,
    value: Tensor,
    cache: PagedKVCache,
    index_name: str,
    num_tokens: int,
) -> None:
    """Check new keys and values against the cache; there may be more rows than tokens."""
    tensors = ((names[0], key, cache.head_dim_qk), (names[1], value, cache.head_dim_vo))
    for name, tensor, head_dim in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 3 or tuple(tensor.shape[1:]) != (cache.num_kv_heads, head_dim):
            raise ValueError(
                f"{name} must be [num_tokens, {cache.num_kv_heads}, {head_dim}] for a cache of "
                f"{cache.num_kv_heads} heads ({cache.kv_layout}), got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype != cache.dtype:
            raise TypeError(
                f"{name} must have the cache's dtype {cache.dtype}, got {tensor.dtype}: "
                "convert it, nothing is reinterpreted"
            )
        _check_device(name, tensor, (cache.device,))
        if head_dim > 1 and tensor.stride(2) != 1:
            raise ValueError(
                f"the last dimension of {name} must have stride 1, got {tensor.stride(2)}"
            )
        if tensor.size(0) < num_tokens:
            raise ValueError(
                f"{index_name} names {num_tokens} tokens, {name} has only {tensor.size(0)} rows"
            )


def check_index(name: str, tensor: Tensor, device: torch.device) -> None:
    """Check a contiguous vector of int32 or int64 on `device`."""
    _check_index(name, tensor, contiguous=True)
    _check_device(name, tensor, (device,))


def check_slots(slot_mapping: Tensor, num_slots: int) -> None:
    """Check slots against the pool and each other; reads them on the host."""
    slots = slot_mapping.cpu()
    slots = slots[slots >= 0]
    _check_range("slot_mapping names slot", slots, num_slots)
    repeated = _repeated(slots)
    if repeated.numel():
        raise ValueError(f"slot_mapping must name each slot once, got {int(repeated[0])} again")


def refuse_scales(**scales: Any) -> None:
    """Refuse scales: there is no quantised cache yet, and dropping them would be silent."""
    for name, scale in scales.items():
        if scale is not None:
            given = "a tensor" if isinstance(scale, Tensor) else repr(scale)
            raise ValueError(
                f"{name} must be None, got {given}: writing with a scale (an fp8 cache) is not "
                "supported yet"
            )


def _check_index(name: str, tensor: Tensor, *, contiguous: bool) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
    if tensor.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(tensor.shape)}")
    if contiguous and tensor.size(0) > 1 and tensor.stride(0) != 1:
        raise ValueError(f"{name} must be contiguous, got stride {tensor.stride(0)}")


def _check_device(name: str, tensor: Tensor, allowed: Sequence[torch.device]) -> None:
    if tensor.device not in allowed:
        names = " or ".join(str(device) for device in dict.fromkeys(allowed))
        raise ValueError(f"{name} must be on {names}, got {tensor.device}")


def _check_range(what: str, ids: Tensor, count: int) -> None:
    if ids.numel() == 0:
        return
    low, high = (int(x) for x in torch.aminmax(ids))
    if low < 0 or high >= count:
        raise ValueError(f"{what} {low if low < 0 else high}, allowed are 0 to {count - 1}")


def _repeated(ids: Tensor) -> Tensor:
    ordered = ids.sort().values
    return ordered[1:][ordered[1:] == ordered[:-1]]
