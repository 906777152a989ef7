"""Copy pages from one place to another: `copy_blocks`, `swap_blocks` and `gather_blocks`.

    layout   planes: K and V of each layer, a source and a target view each, any strides; ids [n]
    grid     one program per (plane, pair of pages, tile of 16 KiB); a few that loop if a side is
             on the host
    method   load the tile of the source page as 16-byte vectors, store it in the target page

Source and target may be one pool (`copy_blocks`), two, or a pool and a fresh tensor; all layers
share one launch. Pinned memory is read and written in place, through its address: one launch moves
any number of scattered pages, where a copy a page is bound by its own start-up time. That is
limited by the bus, so a few programs saturate it and the rest of the chip stays free.

A pair with an id outside its pool is skipped, so a mapping may be padded with -1. Without target
ids the i-th source page goes to page i, and one outside the pool gives zeros.
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

# Programs that share the work if one side is on the host: 1 MiB in flight fills the bus.
_HOST_PROGRAMS = 64


def _metadata(grid, kernel, args):
    page_bytes = args["ROWS"] * args["RUN"] * args["WORD"].primitive_bitwidth // 8
    pages = args["num_tiles"] // args["CHUNKS"]
    return {"name": f"copy_blocks_kernel_{page_bytes}B_x{pages}", "bytes": 2 * pages * page_bytes}


@triton.jit(
    launch_metadata=_metadata,
    do_not_specialize=[
        "src_first",
        "dst_first",
        "src_second",
        "dst_second",
        "num_src_pages",
        "num_dst_pages",
        "num_pairs",
        "num_tiles",
        "stride_src_ids",
        "stride_dst_ids",
        "stride_src_page",
        "stride_src_outer",
        "stride_src_inner",
        "stride_dst_page",
        "stride_dst_outer",
        "stride_dst_inner",
    ],
)
def copy_blocks_kernel(
    addresses_ptr,
    src_first,
    dst_first,
    src_second,
    dst_second,
    src_ids_ptr,
    dst_ids_ptr,
    num_src_pages,
    num_dst_pages,
    num_pairs,
    num_tiles,
    stride_src_ids,
    stride_dst_ids,
    stride_src_page,
    stride_src_outer,
    stride_src_inner,
    stride_dst_page,
    stride_dst_outer,
    stride_dst_inner,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    RUN: tl.constexpr,
    CHUNKS: tl.constexpr,
    WORD: tl.constexpr,
    VEC_BYTES: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_DST_IDS: tl.constexpr,
):
    """Copy every num_programs-th tile; up to two planes need no table of addresses."""
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        chunk = tile % CHUNKS
        pair = (tile // CHUNKS % num_pairs).to(tl.int64)
        plane = tile // CHUNKS // num_pairs
        src = tl.load(src_ids_ptr + pair * stride_src_ids).to(tl.int64)
        src_exists = (src >= 0) & (src < num_src_pages)
        if HAS_DST_IDS:
            dst = tl.load(dst_ids_ptr + pair * stride_dst_ids).to(tl.int64)
            dst_exists = src_exists & (dst >= 0) & (dst < num_dst_pages)
        else:
            dst = pair
            dst_exists = dst < num_dst_pages
        if HAS_TABLE:
            src_address = tl.load(addresses_ptr + 2 * plane)
            dst_address = tl.load(addresses_ptr + 2 * plane + 1)
        else:
            src_address = tl.where(plane == 0, src_first, src_second)
            dst_address = tl.where(plane == 0, dst_first, dst_second)

        words = chunk * BLOCK + tl.arange(0, BLOCK)
        mask = words < ROWS * RUN
        offs_src = word_offsets(words, stride_src_outer, stride_src_inner, ROWS, INNER, RUN, VEC)
        offs_dst = word_offsets(words, stride_dst_outer, stride_dst_inner, ROWS, INNER, RUN, VEC)
        src_ptr = page_words(src_address, src, stride_src_page, WORD, VEC_BYTES)
        dst_ptr = page_words(dst_address, dst, stride_dst_page, WORD, VEC_BYTES)
        values = tl.load(src_ptr + offs_src, mask=mask & src_exists, other=0)
        tl.store(dst_ptr + offs_dst, values, mask=mask & dst_exists)


def copy_blocks(
    sources: Sequence[PagedKVCache],
    targets: Sequence[PagedKVCache],
    src_ids: Tensor,
    dst_ids: Tensor | None,
) -> None:
    """Launch the kernel for each distinct page shape: once for the layers of a usual model.

    Parameters
    ----------
    sources, targets : sequence of PagedKVCache, one a layer
        Equal in page geometry and dtype; sources alike in number of pages, targets too. They may be
        the same caches. At most one side is in pinned host memory, the rest on one device.
    src_ids : Tensor, shape [n], int32 or int64, on the device
    dst_ids : Tensor, shape [n], int32 or int64, on the device, optional
        No target may be named twice, nor be a source as well: copies have no order. Without it
        page `src_ids[i]` goes to page i.
    """
    device, num_pairs = src_ids.device, src_ids.size(0)
    on_host = "cpu" in (sources[0].device.type, targets[0].device.type)
    views = [
        plane
        for source, target in zip(sources, targets, strict=True)
        for plane in ((source.k, target.k), (source.v, target.v))
    ]
    with on_device(device):
        for planes in group_planes(views):
            num_tiles = planes.chunks * num_pairs * len(planes.addresses)
            has_table = len(planes.addresses) > 2
            copy_blocks_kernel[(min(num_tiles, _HOST_PROGRAMS) if on_host else num_tiles,)](
                address_table(planes.addresses, device) if has_table else None,
                *planes.addresses[0],
                *planes.addresses[-1],
                src_ids,
                dst_ids,
                sources[0].num_pages,
                targets[0].num_pages,
                num_pairs,
                num_tiles,
                src_ids.stride(0),
                0 if dst_ids is None else dst_ids.stride(0),
                *planes.strides,
                **planes.constants,
                HAS_TABLE=has_table,
                HAS_DST_IDS=dst_ids is not None,
            )
