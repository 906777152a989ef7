"""Write a step's metadata into a stage's fixed tensors, padded up to their capacity.

    layout   qo_indptr [batch + 1], seq_lens [batch], block_table [batch, width] or CSR
                 -> the same at capacity, the table dense [max_batch, max_pages], all int32
    grid     one lane an entry of the target table, capacity only
    method   copy what is there; pad requests with no query tokens and no keys, entries with -1;
             clamp a length to what its own row holds, which the wider target no longer tells

The target stays what a captured graph reads: every entry is written at every launch, so nothing of
a larger batch is left behind.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tritonattn.kernels._config import on_device
from tritonattn.layout import PageTable

BLOCK = 1024


def _metadata(grid, kernel, args):
    return {"name": f"stage_metadata_kernel_b{args['max_batch']}_p{args['max_pages']}"}


@triton.jit(
    launch_metadata=_metadata,
    do_not_specialize=["batch_size", "width", "stride_row", "max_batch", "max_pages"],
)
def stage_metadata_kernel(
    qo_indptr_ptr,
    seq_lens_ptr,
    page_ids_ptr,
    indptr_ptr,
    qo_indptr_out_ptr,
    seq_lens_out_ptr,
    table_out_ptr,
    batch_size,
    width,
    stride_row,
    max_batch,
    max_pages,
    PAGE_SIZE: tl.constexpr,
    IS_CSR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK entries of the table, and the lengths of the requests that begin among them."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = entry // max_pages
    column = entry % max_pages
    mask = request < max_batch
    live = request < batch_size
    if IS_CSR:
        begin = tl.maximum(tl.load(indptr_ptr + request, mask=live, other=0), 0)
        end = tl.load(indptr_ptr + request + 1, mask=live, other=0)
        pages = tl.maximum(tl.minimum(end, width) - begin, 0)
        at = begin.to(tl.int64) + column
    else:
        pages = width + 0 * request
        at = request.to(tl.int64) * stride_row + column
    pages = tl.minimum(pages, max_pages)
    used = live & (column < pages)
    page = tl.load(page_ids_ptr + at, mask=used, other=-1)
    tl.store(table_out_ptr + entry, page, mask=mask)

    first = mask & (column == 0)
    seq_len = tl.load(seq_lens_ptr + request, mask=first & live, other=0).to(tl.int64)
    room = pages.to(tl.int64) * PAGE_SIZE
    seq_len = tl.minimum(tl.maximum(seq_len, 0), room).to(tl.int32)
    tl.store(seq_lens_out_ptr + request, seq_len, mask=first)
    # Past the batch every request begins and ends where the last one ended.
    start = tl.load(qo_indptr_ptr + tl.minimum(request, batch_size), mask=first, other=0)
    end = tl.load(qo_indptr_ptr + tl.minimum(request + 1, batch_size), mask=first, other=0)
    tl.store(qo_indptr_out_ptr + request, start, mask=first)
    tl.store(qo_indptr_out_ptr + request + 1, end, mask=first & (request == max_batch - 1))


def stage_metadata(
    qo_indptr: Tensor,
    table: PageTable,
    qo_indptr_out: Tensor,
    seq_lens_out: Tensor,
    table_out: Tensor,
) -> None:
    """Launch the kernel.

    Parameters
    ----------
    qo_indptr : Tensor, shape [batch + 1], int32
    table : PageTable
        At most as many requests as the targets hold; columns past theirs are dropped.
    qo_indptr_out, seq_lens_out : Tensor, shape [max_batch + 1] and [max_batch], int32
    table_out : Tensor, shape [max_batch, max_pages], int32, contiguous
    """
    max_batch, max_pages = table_out.shape
    with on_device(table_out.device):
        stage_metadata_kernel[(triton.cdiv(max_batch * max_pages, BLOCK),)](
            qo_indptr,
            table.lengths,
            table.page_ids,
            table.indptr if table.indptr is not None else table.lengths,
            qo_indptr_out,
            seq_lens_out,
            table_out,
            table.batch_size,
            table.width,
            0 if table.is_csr else table.page_ids.stride(0),
            max_batch,
            max_pages,
            PAGE_SIZE=table.page_size,
            IS_CSR=table.is_csr,
            BLOCK=BLOCK,
        )
