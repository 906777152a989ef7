"""Copy pages within each of many caches: all layers, keys and values, in one launch.

    layout   planes (K and V of each layer), any strides; ids [n] int64 of source and target pages
    grid     one program per (plane, pair of pages, tile of 16 KiB)
    method   load the tile of the source page as 16-byte vectors, store it in the target page

A pair with an id outside the pool is skipped, so a mapping may be padded with -1.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tritonattn.kernels._words import (
    Planes,
    address_table,
    group_planes,
    on_device,
    page_words,
    word_offsets,
)
from tritonattn.layout import PagedKVCache


def _metadata(grid, kernel, args):
    page_bytes = args["ROWS"] * args["RUN"] * args["WORD"].primitive_bitwidth // 8
    pages = grid[0] // args["CHUNKS"]
    return {"name": f"copy_blocks_kernel_{page_bytes}B_x{pages}", "bytes": 2 * pages * page_bytes}


@triton.jit(
    launch_metadata=_metadata,
    do_not_specialize=[
        "num_pages",
        "num_pairs",
        "stride_ids",
        "stride_page",
        "stride_outer",
        "stride_inner",
    ],
)
def copy_blocks_kernel(
    addresses_ptr,
    src_ids_ptr,
    dst_ids_ptr,
    num_pages,
    num_pairs,
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
    """Copy one tile of one page of one plane."""
    chunk = tl.program_id(0) % CHUNKS
    pair = tl.program_id(0) // CHUNKS % num_pairs
    plane = tl.program_id(0) // CHUNKS // num_pairs
    src = tl.load(src_ids_ptr + pair.to(tl.int64) * stride_ids)
    dst = tl.load(dst_ids_ptr + pair.to(tl.int64) * stride_ids)
    address = tl.load(addresses_ptr + plane)
    if (src < 0) | (src >= num_pages) | (dst < 0) | (dst >= num_pages):
        return
    words = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = words < ROWS * RUN
    offs = word_offsets(words, stride_outer, stride_inner, ROWS, INNER, RUN, VEC)
    tile = tl.load(page_words(address, src, stride_page, WORD, VEC_BYTES) + offs, mask=mask)
    tl.store(page_words(address, dst, stride_page, WORD, VEC_BYTES) + offs, tile, mask=mask)


def copy_blocks(caches: Sequence[PagedKVCache], src_to_dst: Tensor) -> None:
    """Launch the kernel for each distinct page shape: once for the layers of a usual model.

    Parameters
    ----------
    caches : sequence of PagedKVCache
        Equal in geometry, dtype and device.
    src_to_dst : Tensor, shape [n, 2], int64, on the caches' device
        No target may be named twice, nor be a source as well: the order of copies is not defined.
    """
    device, num_pairs = caches[0].device, src_to_dst.size(0)
    with on_device(device):
        for planes in group_planes([(view,) for cache in caches for view in (cache.k, cache.v)]):
            copy_blocks_kernel[_grid(planes, num_pairs)](
                address_table(tuple(address for (address,) in planes.addresses), device),
                src_to_dst[:, 0],
                src_to_dst[:, 1],
                caches[0].num_pages,
                num_pairs,
                src_to_dst.stride(0),
                *planes.strides,
                **planes.constants,
            )


def _grid(planes: Planes, num_pairs: int) -> tuple[int]:
    return (planes.chunks * num_pairs * len(planes.addresses),)
