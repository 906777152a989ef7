"""Copy pages of one cache into another: `swap_blocks`, and `gather_blocks` into a fresh one.

    layout   K and V of two caches, any strides, in device or pinned host memory; ids [n]
    grid     one program per (page, K or V, tile of 16 KiB); a few that loop with a side on the host
    method   load the tile of the source page as 16-byte vectors, store it in the target page

Pinned memory is read and written in place, through its address: one launch moves any number of
scattered pages, where a copy a page is bound by its own start-up time. That is limited by the bus,
so a few programs saturate it and the rest of the chip stays free. A source id outside its pool
gives zeros, a target id outside its pool is skipped.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tritonattn.kernels._words import group_planes, on_device, page_words, word_offsets
from tritonattn.layout import PagedKVCache

# Programs that share the work if one side is on the host: 1 MiB in flight fills the bus.
_HOST_PROGRAMS = 64


def _metadata(grid, kernel, args):
    page_bytes = args["ROWS"] * args["RUN"] * args["WORD"].primitive_bitwidth // 8
    pages = args["num_tiles"] // args["CHUNKS"]
    return {"name": f"move_blocks_kernel_{page_bytes}B_x{pages}", "bytes": 2 * pages * page_bytes}


@triton.jit(
    launch_metadata=_metadata,
    do_not_specialize=[
        "src_k",
        "src_v",
        "dst_k",
        "dst_v",
        "num_src_pages",
        "num_dst_pages",
        "num_tiles",
        "num_planes",
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
def move_blocks_kernel(
    src_k,
    src_v,
    dst_k,
    dst_v,
    src_ids_ptr,
    dst_ids_ptr,
    num_src_pages,
    num_dst_pages,
    num_tiles,
    num_planes,
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
    HAS_DST_IDS: tl.constexpr,
):
    """Copy every num_programs-th tile; without target ids the i-th page goes to page i."""
    for item in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        chunk = item % CHUNKS
        plane = item // CHUNKS % num_planes
        at = (item // CHUNKS // num_planes).to(tl.int64)
        src = tl.load(src_ids_ptr + at * stride_src_ids).to(tl.int64)
        dst = at
        if HAS_DST_IDS:
            dst = tl.load(dst_ids_ptr + at * stride_dst_ids).to(tl.int64)
        src_address = tl.where(plane == 0, src_k, src_v)
        dst_address = tl.where(plane == 0, dst_k, dst_v)

        words = chunk * BLOCK + tl.arange(0, BLOCK)
        offs_src = word_offsets(words, stride_src_outer, stride_src_inner, ROWS, INNER, RUN, VEC)
        offs_dst = word_offsets(words, stride_dst_outer, stride_dst_inner, ROWS, INNER, RUN, VEC)
        mask = words < ROWS * RUN
        mask_src = mask & (src >= 0) & (src < num_src_pages)
        mask_dst = mask & (dst >= 0) & (dst < num_dst_pages)
        src_ptr = page_words(src_address, src, stride_src_page, WORD, VEC_BYTES)
        dst_ptr = page_words(dst_address, dst, stride_dst_page, WORD, VEC_BYTES)
        tile = tl.load(src_ptr + offs_src, mask=mask_src, other=0)
        tl.store(dst_ptr + offs_dst, tile, mask=mask_dst)


def move_blocks(
    src: PagedKVCache, dst: PagedKVCache, src_ids: Tensor, dst_ids: Tensor | None
) -> None:
    """Launch the kernel: once, or once for K and once for V if they differ in shape.

    Parameters
    ----------
    src, dst : PagedKVCache
        Equal but for strides and the number of pages; at most one in pinned host memory, the rest
        on one device.
    src_ids : Tensor, shape [n], int32 or int64, on the device
    dst_ids : Tensor, shape [n], int32 or int64, on the device, optional
        Without it page `src_ids[i]` goes to page i.
    """
    with on_device(src_ids.device):
        for planes in group_planes([(src.k, dst.k), (src.v, dst.v)]):
            (src_k, dst_k), (src_v, dst_v) = planes.addresses[0], planes.addresses[-1]
            num_tiles = planes.chunks * len(planes.addresses) * src_ids.size(0)
            on_host = "cpu" in (src.device.type, dst.device.type)
            move_blocks_kernel[(min(num_tiles, _HOST_PROGRAMS) if on_host else num_tiles,)](
                src_k,
                src_v,
                dst_k,
                dst_v,
                src_ids,
                dst_ids,
                src.num_pages,
                dst.num_pages,
                num_tiles,
                len(planes.addresses),
                src_ids.stride(0),
                0 if dst_ids is None else dst_ids.stride(0),
                *planes.strides,
                **planes.constants,
                HAS_DST_IDS=dst_ids is not None,
            )
