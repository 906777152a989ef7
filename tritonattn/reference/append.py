"""Torch twins of `kernels/append.py`: same arguments, same bytes; metadata is read on the host."""

from __future__ import annotations

from torch import Tensor

from tritonattn.layout import PagedKVCache


def append_to_slots(key: Tensor, value: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
    """Write token i to slot `slot_mapping[i]`; a slot outside the pool is skipped."""
    for token, slot in enumerate(slot_mapping.tolist()):
        page, offset = divmod(slot, cache.page_size)
        if page in range(cache.num_pages):
            cache.k[page, offset] = key[token]
            cache.v[page, offset] = value[token]


def append_to_table(
    key: Tensor,
    value: Tensor,
    cache: PagedKVCache,
    batch_indices: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
) -> None:
    """Write token i to `positions[i]` of request `batch_indices[i]`, if there is such a place."""
    ends = kv_indptr.tolist()
    places = zip(batch_indices.tolist(), positions.tolist(), strict=True)
    for token, (request, position) in enumerate(places):
        if request not in range(len(ends) - 1) or position < 0:
            continue
        pages = kv_indices[ends[request] : ends[request + 1]].tolist()
        page_at, offset = divmod(position, cache.page_size)
        if page_at < len(pages) and pages[page_at] in range(cache.num_pages):
            cache.k[pages[page_at], offset] = key[token]
            cache.v[pages[page_at], offset] = value[token]
