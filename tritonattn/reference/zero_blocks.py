"""Torch twin of `kernels/zero_blocks.py`: same arguments, in loops over pages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tritonattn.layout import PagedKVCache


def zero_blocks(caches: Sequence[PagedKVCache], block_ids: Tensor) -> None:
    """Fill pages with zeros in each cache; ids outside the pool are skipped."""
    for page in block_ids.tolist():
        if page in range(caches[0].num_pages):
            for cache in caches:
                cache.k[page] = 0
                cache.v[page] = 0
