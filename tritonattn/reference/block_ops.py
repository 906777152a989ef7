"""Torch twins of `copy_blocks`, `move_blocks` and `zero_blocks` in `kernels/`: same arguments."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tritonattn.layout import PagedKVCache


def copy_blocks(caches: Sequence[PagedKVCache], src_to_dst: Tensor) -> None:
    """Copy pages within each cache; pairs with an id outside the pool are skipped."""
    pool = range(caches[0].num_pages)
    for src, dst in src_to_dst.tolist():
        if src in pool and dst in pool:
            for cache in caches:
                cache.k[dst] = cache.k[src]
                cache.v[dst] = cache.v[src]


def move_blocks(
    src: PagedKVCache, dst: PagedKVCache, src_ids: Tensor, dst_ids: Tensor | None
) -> None:
    """Copy pages into another cache; a source outside its pool is zeros, such a target skipped."""
    sources = src_ids.tolist()
    targets = range(len(sources)) if dst_ids is None else dst_ids.tolist()
    for source, target in zip(sources, targets, strict=True):
        if target in range(dst.num_pages):
            exists = source in range(src.num_pages)
            dst.k[target] = src.k[source] if exists else 0
            dst.v[target] = src.v[source] if exists else 0


def zero_blocks(caches: Sequence[PagedKVCache], block_ids: Tensor) -> None:
    """Fill pages with zeros in each cache; ids outside the pool are skipped."""
    for page in block_ids.tolist():
        if page in range(caches[0].num_pages):
            for cache in caches:
                cache.k[page] = 0
                cache.v[page] = 0
