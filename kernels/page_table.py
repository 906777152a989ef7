"""Page table, lengths and write slots of a step, from what engines hand over.

    layout   slots [n] int64, cu_seqlens [batch + 1] int32
                 -> page_table [batch, width], seq_lens [batch] int32
             block_table [batch, width], cu_seqlens
                 -> seq_lens [batch] int32, slot_mapping [rows] int64
    grid     one lane an entry of the output, capacity only
    method   entry (i, j) is the page of request i's token j * page_size: its slot // page_size

A slot is page * page_size + offset. Slots of a request stand in order, so that every page_size-th
of them begins a page. Nothing is read for a request of length 0, whatever its row holds, nor past
a request's end.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tritonattn.kernels._config import pow2_ceil


def _table_metadata(grid, kernel, args):
    return {"name": f"slots_to_pages_kernel_b{args['batch_size']}_w{args['width']}"}


@triton.jit(launch_metadata=_table_metadata, do_not_specialize=["num_slots", "batch_size", "width"])
def slots_to_pages_kernel(
    slots_ptr,
    cu_seqlens_ptr,
    page_table_ptr,
    seq_lens_ptr,
    num_slots,
    batch_size,
    width,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK entries of the table, and the lengths of the rows that begin among them."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = entry // width
    column = entry % width
    mask = request < batch_size
    begin = tl.load(cu_seqlens_ptr + request, mask=mask, other=0).to(tl.int64)
    length = tl.load(cu_seqlens_ptr + request + 1, mask=mask, other=0) - begin
    first = column.to(tl.int64) * PAGE_SIZE
    at = begin + first
    used = mask & (first < length) & (at < num_slots)
    slot = tl.load(slots_ptr + at, mask=used, other=-1)
    # Division truncates towards 0: without the comparison a slot of -1 would be page 0.
    page = tl.where(slot >= 0, slot // PAGE_SIZE, -1).to(tl.int32)
    tl.store(page_table_ptr + entry, page, mask=mask)
    tl.store(seq_lens_ptr + request, length.to(tl.int32), mask=mask & (column == 0))


def slots_to_pages(
    slots: Tensor, cu_seqlens: Tensor, page_table: Tensor, seq_lens: Tensor, *, page_size: int
) -> None:
    """Launch the kernel that makes a block table from the slots of all keys.

    Parameters
    ----------
    slots : Tensor, shape [num_slots], int64
        Slots of all keys, request by request; entries past `cu_seqlens[-1]` are padding.
    cu_seqlens : Tensor, shape [batch + 1], int32
        First entry of each request in `slots`.
    page_table : Tensor, shape [batch, width], int32, contiguous
        Written in full, -1 past a request's pages and for a negative slot. A request longer than
        its row is cut short.
    seq_lens : Tensor, shape [batch], int32
        Written in full.
    page_size : int
        Tokens.
    """
    batch_size, width = page_table.shape
    block = min(1024, pow2_ceil(page_table.numel()))
    slots_to_pages_kernel[(triton.cdiv(page_table.numel(), block),)](
        slots,
        cu_seqlens,
        page_table,
        seq_lens,
        slots.numel(),
        batch_size,
        width,
        PAGE_SIZE=page_size,
        BLOCK=block,
        num_warps=4,
    )


def _slots_metadata(grid, kernel, args):
    return {"name": f"last_slots_kernel_b{args['batch_size']}"}


@triton.jit(
    launch_metadata=_slots_metadata,
    do_not_specialize=["num_rows", "batch_size", "width", "stride_table_row"],
)
def last_slots_kernel(
    block_table_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    slot_mapping_ptr,
    num_rows,
    batch_size,
    width,
    stride_table_row,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK lengths and slots; rows past the batch and requests without keys get -1."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < batch_size
    begin = tl.load(cu_seqlens_ptr + row, mask=mask, other=0)
    length = tl.load(cu_seqlens_ptr + row + 1, mask=mask, other=0) - begin
    last = length - 1
    page_at = last // PAGE_SIZE
    used = mask & (length > 0) & (page_at < width)
    at = row.to(tl.int64) * stride_table_row + page_at
    page = tl.load(block_table_ptr + at, mask=used, other=-1).to(tl.int64)
    slot = tl.where(used & (page >= 0), page * PAGE_SIZE + last % PAGE_SIZE, -1)
    tl.store(seq_lens_ptr + row, length, mask=mask)
    tl.store(slot_mapping_ptr + row, slot, mask=row < num_rows)


def last_slots(
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    *,
    page_size: int,
) -> None:
    """Launch the kernel that finds where a decode step writes: the slot of each request's last key.

    Parameters
    ----------
    block_table : Tensor, shape [batch, width], int32
        Page ids; last stride 1. Rows of requests without keys are not read.
    cu_seqlens : Tensor, shape [batch + 1], int32
        Cumulative key lengths, the new token included.
    seq_lens : Tensor, shape [batch], int32
        Written in full.
    slot_mapping : Tensor, shape [rows], int64
        Row i is request i's new token. Written in full, -1 where there is nothing to write.
    page_size : int
        Tokens.
    """
    batch_size, width = block_table.shape
    rows = max(slot_mapping.numel(), batch_size)
    block = min(1024, pow2_ceil(rows))
    last_slots_kernel[(triton.cdiv(rows, block),)](
        block_table,
        cu_seqlens,
        seq_lens,
        slot_mapping,
        slot_mapping.numel(),
        batch_size,
        width,
        block_table.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=block,
        num_warps=4,
    )
