"""Write keys and values of new tokens to their places: by slot, or by request and position.

    layout   key [n, Hkv, D], value [n, Hkv, Dv] -> pages of K and V by strides
    grid     one program per (token, tile of heads x dims); n is a capacity, padding exits at once
    method   slot = page * page_size + offset, or the page is indices[indptr[request] + position //
             page_size]

Elements are copied as they are, whatever the dtype: cache and tokens have the same one. A token
without a place (a slot, request or position that is negative or too large) is skipped, so a batch
padded with -1 can be replayed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonattn.kernels._config import on_device, pow2_ceil
from tritonattn.layout import PagedKVCache, kernel_strides

_TILE_BYTES = 4096  # of K, and as many of V

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _write_row(
    src_ptr,
    dst_ptr,
    stride_src_head,
    stride_dst_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy this program's tile of one token's heads."""
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < NUM_HEADS * HEAD_DIM
    head = (offs // HEAD_DIM).to(tl.int64)
    offs_d = offs % HEAD_DIM
    row = tl.load(src_ptr + head * stride_src_head + offs_d, mask=mask)
    tl.store(dst_ptr + head * stride_dst_head + offs_d, row, mask=mask)


@triton.jit
def _write_token(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    page,
    offset,
    stride_key_tok,
    stride_key_head,
    stride_value_tok,
    stride_value_head,
    stride_k_page,
    stride_k_tok,
    stride_k_head,
    stride_v_page,
    stride_v_tok,
    stride_v_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy this program's tile of its token's key and value to a place in a page; both int64."""
    token = tl.program_id(0).to(tl.int64)
    key_ptr += token * stride_key_tok
    value_ptr += token * stride_value_tok
    k_ptr += page * stride_k_page + offset * stride_k_tok
    v_ptr += page * stride_v_page + offset * stride_v_tok
    _write_row(key_ptr, k_ptr, stride_key_head, stride_k_head, NUM_HEADS, HEAD_DIM_QK, BLOCK)
    _write_row(value_ptr, v_ptr, stride_value_head, stride_v_head, NUM_HEADS, HEAD_DIM_VO, BLOCK)


def _slot_metadata(grid, kernel, args):
    return {"name": f"slot_append_kernel_n{grid[0]}", "bytes": _bytes_moved(grid, args)}


def _table_metadata(grid, kernel, args):
    return {"name": f"table_append_kernel_n{grid[0]}", "bytes": _bytes_moved(grid, args)}


def _bytes_moved(grid, args):
    dims = args["HEAD_DIM_QK"] + args["HEAD_DIM_VO"]
    return 2 * grid[0] * args["NUM_HEADS"] * dims * args["key_ptr"].element_size()


@triton.jit(launch_metadata=_slot_metadata, do_not_specialize=["num_pages"])
def slot_append_kernel(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    slot_mapping_ptr,
    num_pages,
    stride_key_tok,
    stride_key_head,
    stride_value_tok,
    stride_value_head,
    stride_k_page,
    stride_k_tok,
    stride_k_head,
    stride_v_page,
    stride_v_tok,
    stride_v_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one token to its slot."""
    slot = tl.load(slot_mapping_ptr + tl.program_id(0)).to(tl.int64)
    page = slot // PAGE_SIZE
    if (slot < 0) | (page >= num_pages):
        return
    _write_token(
        key_ptr, value_ptr, k_ptr, v_ptr, page, slot % PAGE_SIZE,
        stride_key_tok, stride_key_head, stride_value_tok, stride_value_head,
        stride_k_page, stride_k_tok, stride_k_head, stride_v_page, stride_v_tok, stride_v_head,
        NUM_HEADS, HEAD_DIM_QK, HEAD_DIM_VO, BLOCK,
    )  # fmt: skip


@triton.jit(
    launch_metadata=_table_metadata, do_not_specialize=["num_pages", "batch_size", "num_indices"]
)
def table_append_kernel(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    batch_indices_ptr,
    positions_ptr,
    kv_indices_ptr,
    kv_indptr_ptr,
    num_pages,
    batch_size,
    num_indices,
    stride_key_tok,
    stride_key_head,
    stride_value_tok,
    stride_value_head,
    stride_k_page,
    stride_k_tok,
    stride_k_head,
    stride_v_page,
    stride_v_tok,
    stride_v_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one token to its position in its request, if the request's row of the table has it."""
    request = tl.load(batch_indices_ptr + tl.program_id(0)).to(tl.int64)
    position = tl.load(positions_ptr + tl.program_id(0)).to(tl.int64)
    if (request < 0) | (request >= batch_size) | (position < 0):
        return
    at = tl.load(kv_indptr_ptr + request).to(tl.int64) + position // PAGE_SIZE
    end = tl.load(kv_indptr_ptr + request + 1).to(tl.int64)
    if (at < 0) | (at >= tl.minimum(end, num_indices)):
        return
    page = tl.load(kv_indices_ptr + at).to(tl.int64)
    if (page < 0) | (page >= num_pages):
        return
    _write_token(
        key_ptr, value_ptr, k_ptr, v_ptr, page, position % PAGE_SIZE,
        stride_key_tok, stride_key_head, stride_value_tok, stride_value_head,
        stride_k_page, stride_k_tok, stride_k_head, stride_v_page, stride_v_tok, stride_v_head,
        NUM_HEADS, HEAD_DIM_QK, HEAD_DIM_VO, BLOCK,
    )  # fmt: skip


def _tile(cache: PagedKVCache) -> tuple[int, int]:
    """Return (elements of a tile, tiles of a token)."""
    elements = cache.num_kv_heads * max(cache.head_dim_qk, cache.head_dim_vo)
    block = min(_TILE_BYTES // cache.dtype.itemsize, pow2_ceil(elements))
    return block, triton.cdiv(elements, block)


def _constants(cache: PagedKVCache, block: int) -> dict[str, Any]:
    return {
        "NUM_HEADS": cache.num_kv_heads,
        "HEAD_DIM_QK": cache.head_dim_qk,
        "HEAD_DIM_VO": cache.head_dim_vo,
        "PAGE_SIZE": cache.page_size,
        "BLOCK": block,
        # Every thread has a vector of 16 bytes.
        "num_warps": max(1, min(4, block * cache.dtype.itemsize // 512)),
    }


def _bits(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors as integers of the same size: no dtype is too new for a copy."""
    return [tensor.view(_BITS[tensor.element_size()]) for tensor in tensors]


def append_to_slots(key: Tensor, value: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
    """Launch the kernel that writes token i to slot `slot_mapping[i]`.

    Parameters
    ----------
    key : Tensor, shape [rows, num_kv_heads, head_dim_qk]
        Any strides with a last stride of 1; rows past the mapping are not read.
    value : Tensor, shape [rows, num_kv_heads, head_dim_vo]
    cache : PagedKVCache
        Same dtype and device.
    slot_mapping : Tensor, shape [num_tokens], int32 or int64, contiguous
        page * page_size + offset; negative ones are skipped. No slot may be named twice.
    """
    block, tiles = _tile(cache)
    with on_device(cache.device):
        slot_append_kernel[(slot_mapping.size(0), tiles)](
            *_bits(key, value, cache.k, cache.v),
            slot_mapping,
            cache.num_pages,
            *kernel_strides(key),
            *kernel_strides(value),
            *kernel_strides(cache.k),
            *kernel_strides(cache.v),
            **_constants(cache, block),
        )


def append_to_table(
    key: Tensor,
    value: Tensor,
    cache: PagedKVCache,
    batch_indices: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
) -> None:
    """Launch the kernel that writes token i to `positions[i]` of request `batch_indices[i]`.

    Parameters
    ----------
    key : Tensor, shape [rows, num_kv_heads, head_dim_qk]
        Any strides with a last stride of 1; rows past `batch_indices` are not read.
    value : Tensor, shape [rows, num_kv_heads, head_dim_vo]
    cache : PagedKVCache
        Same dtype and device.
    batch_indices, positions : Tensor, shape [num_tokens], int32 or int64, contiguous
        Tokens of a negative request are skipped. No position of a request may be named twice.
    kv_indices : Tensor, shape [num_indices], int32 or int64, contiguous
    kv_indptr : Tensor, shape [batch + 1], int32 or int64, contiguous
        `kv_indptr[0]` may differ from 0.
    """
    block, tiles = _tile(cache)
    with on_device(cache.device):
        table_append_kernel[(batch_indices.size(0), tiles)](
            *_bits(key, value, cache.k, cache.v),
            batch_indices,
            positions,
            kv_indices,
            kv_indptr,
            cache.num_pages,
            kv_indptr.size(0) - 1,
            kv_indices.size(0),
            *kernel_strides(key),
            *kernel_strides(value),
            *kernel_strides(cache.k),
            *kernel_strides(cache.v),
            **_constants(cache, block),
        )
