"""Fill pages with zero bytes in each of many caches: all layers, keys and values, in one launch.

    layout   planes (K and V of each layer), any strides; block_ids [n] int32 or int64
    grid     one program per (plane, page, tile of 16 KiB)
    method   store zeros as 16-byte vectors

An id outside the pool is skipped, so the ids may be padded with -1.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tritonattn.kernels._config import on_device
from tritonattn.kernels._words import (
    address_table,
    group_planes,
    page_words,
    word_offsets,
)
from tritonattn.layout import PagedKVCache


def _metadata(grid, kernel, args):
    page_bytes = args["ROWS"] * args["RUN"] * args["WORD"].primitive_bitwidth // 8
    pages = grid[0] // args["CHUNKS"]
    return {"name": f"zero_blocks_kernel_{page_bytes}B_x{pages}", "bytes": pages * page_bytes}


@triton.jit(
    launch_metadata=_metadata,
    do_not_specialize=[
        "num_pages",
        "num_ids",
        "stride_ids",
        "stride_page",
        "stride_outer",
        "stride_inner",
    ],
)
def zero_blocks_kernel(
    addresses_ptr,
    block_ids_ptr,
    num_pages,
    num_ids,
    stride_ids,
    stride_page,
    stride_outer,
    stride_inner,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    RUN: tl.constexpr,
    CHUNKS: tl.constexpr,
    WORD: tl.constexpr,
    VEC_BYTES: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zero one tile of one page of one plane."""
    chunk = tl.program_id(0) % CHUNKS
    at = tl.program_id(0) // CHUNKS % num_ids
    plane = tl.program_id(0) // CHUNKS // num_ids
    page = tl.load(block_ids_ptr + at.to(tl.int64) * stride_ids)
    address = tl.load(addresses_ptr + plane)
    if (page < 0) | (page >= num_pages):
        return
    words = chunk * BLOCK + tl.arange(0, BLOCK)
    offs = word_offsets(words, stride_outer, stride_inner, ROWS, INNER, RUN, VEC)
    start = page_words(address, page, stride_page, WORD, VEC_BYTES)
    tl.store(start + offs, tl.zeros([BLOCK], WORD), mask=words < ROWS * RUN)


def zero_blocks(caches: Sequence[PagedKVCache], block_ids: Tensor) -> None:
    """Launch the kernel for each distinct page shape: once for the layers of a usual model.

    Parameters
    ----------
    caches : sequence of PagedKVCache
        Equal in geometry, dtype and device.
    block_ids : Tensor, shape [n], int32 or int64, on the caches' device
    """
    device, num_ids = caches[0].device, block_ids.size(0)
    with on_device(device):
        for planes in group_planes([(view,) for cache in caches for view in (cache.k, cache.v)]):
            zero_blocks_kernel[(planes.chunks * num_ids * len(planes.addresses),)](
                address_table(planes.addresses, device),
                block_ids,
                caches[0].num_pages,
                num_ids,
                block_ids.stride(0),
                *planes.strides,
                **planes.constants,
            )
