"""Torch twins of `kernels/page_table.py`; they read metadata on the host."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor


def slots_to_pages(
    slots: Tensor, cu_seqlens: Tensor, page_table: Tensor, seq_lens: Tensor, *, page_size: int
) -> None:
    """Make a block table from the slots of all keys: every page_size-th one begins a page."""
    page_table.fill_(-1)
    for request, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        first = slots[begin:end:page_size][: page_table.size(1)]
        page_table[request, : first.numel()] = (first // page_size).clamp(min=-1)
        seq_lens[request] = end - begin


def last_slots(
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    *,
    page_size: int,
) -> None:
    """Find the slot of each request's last key; -1 where there is none."""
    slot_mapping.fill_(-1)
    for request, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        length = end - begin
        seq_lens[request] = length
        page_at, offset = divmod(length - 1, page_size)
        if length > 0 and page_at < block_table.size(1) and request < slot_mapping.numel():
            page = int(block_table[request, page_at])
            slot_mapping[request] = page * page_size + offset if page >= 0 else -1
