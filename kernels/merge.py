"""Merge of attention states: outputs of one query over disjoint sets of keys, joined by their LSE.

    layout   v [n, (states,) heads, D], s [n, (states,) heads] float32, base-2 LSE -> one state
    grid     one program per block of (row, head) pairs
    method   m = max s_i, w_i = 2^(s_i - m), v = sum w_i v_i / sum w_i, s = m + log2(sum w_i)

A state with s = -inf saw no key: its v is not read, whatever it holds. Merging only such states
gives 0 and -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tritonattn.kernels._config import on_device, pow2_ceil
from tritonattn.layout import kernel_strides

_TILE = 2048  # elements of v that a program of four warps holds
_MANY_PROGRAMS = 1024


@triton.jit
def _row_offset(row, stride_tok, stride_head, num_heads):
    """Return the offset of (token, head) number `row`."""
    return (row // num_heads).to(tl.int64) * stride_tok + (row % num_heads).to(
        tl.int64
    ) * stride_head


def _pair_metadata(grid, kernel, args):
    rows, dim, size = args["num_rows"], args["HEAD_DIM"], args["v_a_ptr"].element_size()
    return {
        "name": f"merge_pair_kernel_d{dim}",
        "flops32": 3 * rows * dim,
        "bytes": rows * (3 * dim * size + 12),
    }


@triton.jit(launch_metadata=_pair_metadata, do_not_specialize=["num_rows", "num_heads"])
def merge_pair_kernel(
    v_a_ptr,
    s_a_ptr,
    v_b_ptr,
    s_b_ptr,
    v_out_ptr,
    s_out_ptr,
    mask_ptr,
    num_rows,
    num_heads,
    stride_va_tok,
    stride_va_head,
    stride_sa_tok,
    stride_sa_head,
    stride_vb_tok,
    stride_vb_head,
    stride_sb_tok,
    stride_sb_head,
    stride_vo_tok,
    stride_vo_head,
    stride_so_tok,
    stride_so_head,
    HEAD_DIM: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge two states of BLOCK_R (token, head) rows; with a mask only its tokens are written."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    mask_r = row < num_rows
    if HAS_MASK:
        mask_r = mask_r & (tl.load(mask_ptr + row // num_heads, mask=mask_r, other=0) != 0)
    mask = mask_r[:, None] & (offs_d < HEAD_DIM)[None, :]

    offs_sa = _row_offset(row, stride_sa_tok, stride_sa_head, num_heads)
    offs_sb = _row_offset(row, stride_sb_tok, stride_sb_head, num_heads)
    s_a = tl.load(s_a_ptr + offs_sa, mask=mask_r, other=-float("inf"))
    s_b = tl.load(s_b_ptr + offs_sb, mask=mask_r, other=-float("inf"))
    # Empty states are not read: 0 * NaN would survive.
    offs_va = _row_offset(row, stride_va_tok, stride_va_head, num_heads)[:, None] + offs_d[None, :]
    offs_vb = _row_offset(row, stride_vb_tok, stride_vb_head, num_heads)[:, None] + offs_d[None, :]
    used_a = mask & (s_a != -float("inf"))[:, None]
    used_b = mask & (s_b != -float("inf"))[:, None]
    v_a = tl.load(v_a_ptr + offs_va, mask=used_a, other=0.0).to(tl.float32)
    v_b = tl.load(v_b_ptr + offs_vb, mask=used_b, other=0.0).to(tl.float32)

    m = tl.maximum(s_a, s_b)
    empty = m == -float("inf")
    m_safe = tl.where(empty, 0.0, m)
    w_a = tl.exp2(s_a - m_safe)
    w_b = tl.exp2(s_b - m_safe)
    total = tl.where(empty, 1.0, w_a + w_b)
    v = (v_a * w_a[:, None] + v_b * w_b[:, None]) / total[:, None]
    s = tl.where(empty, -float("inf"), m + tl.log2(total))

    offs_vo = _row_offset(row, stride_vo_tok, stride_vo_head, num_heads)[:, None] + offs_d[None, :]
    offs_so = _row_offset(row, stride_so_tok, stride_so_head, num_heads)
    tl.store(v_out_ptr + offs_vo, v.to(v_out_ptr.dtype.element_ty), mask=mask)
    tl.store(s_out_ptr + offs_so, s, mask=mask_r)


def _many_metadata(grid, kernel, args):
    rows, dim, size = args["num_rows"], args["HEAD_DIM"], args["v_ptr"].element_size()
    states = args["num_states"]
    return {
        "name": f"merge_many_kernel_d{dim}_k{states}",
        "flops32": 2 * rows * states * dim,
        "bytes": rows * (states + 1) * (dim * size + 4),
    }


@triton.jit(
    launch_metadata=_many_metadata, do_not_specialize=["num_rows", "num_states", "num_heads"]
)
def merge_many_kernel(
    v_ptr,
    s_ptr,
    v_out_ptr,
    s_out_ptr,
    num_rows,
    num_states,
    num_heads,
    stride_v_tok,
    stride_v_state,
    stride_v_head,
    stride_s_tok,
    stride_s_state,
    stride_s_head,
    stride_vo_tok,
    stride_vo_head,
    stride_so_tok,
    stride_so_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge all states of BLOCK_R (token, head) rows, in order, so that repeats agree bitwise."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_k = tl.arange(0, BLOCK_K)
    offs_d = tl.arange(0, BLOCK_D)
    mask_r = row < num_rows
    mask = mask_r[:, None] & (offs_d < HEAD_DIM)[None, :]
    s_row_ptr = s_ptr + _row_offset(row, stride_s_tok, stride_s_head, num_heads)
    v_row_ptr = v_ptr + _row_offset(row, stride_v_tok, stride_v_head, num_heads)

    # The weights need the LSEs only. With these known, the loads of v below depend on nothing.
    m = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.full([BLOCK_R], 0.0, tl.float32)
    for first in range(0, num_states, BLOCK_K):
        state = (first + offs_k).to(tl.int64)
        mask_s = mask_r[:, None] & (state < num_states)[None, :]
        offs_s = (state * stride_s_state)[None, :]
        s = tl.load(s_row_ptr[:, None] + offs_s, mask=mask_s, other=-float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        total = total * tl.exp2(m - m_safe) + tl.sum(tl.exp2(s - m_safe[:, None]), 1)
        m = m_new
    empty = m == -float("inf")
    m_safe = tl.where(empty, 0.0, m)
    total = tl.where(empty, 1.0, total)

    acc = tl.full([BLOCK_R, BLOCK_D], 0.0, tl.float32)
    for _ in tl.range(0, num_states, loop_unroll_factor=4):
        s = tl.load(s_row_ptr, mask=mask_r, other=-float("inf"))
        # Empty states are not read: 0 * NaN would survive.
        used = mask & (s != -float("inf"))[:, None]
        v = tl.load(v_row_ptr[:, None] + offs_d[None, :], mask=used, other=0.0)
        acc += v.to(tl.float32) * tl.exp2(s - m_safe)[:, None]
        s_row_ptr += stride_s_state
        v_row_ptr += stride_v_state

    offs_vo = _row_offset(row, stride_vo_tok, stride_vo_head, num_heads)[:, None] + offs_d[None, :]
    offs_so = _row_offset(row, stride_so_tok, stride_so_head, num_heads)
    v_out = acc / total[:, None]
    tl.store(v_out_ptr + offs_vo, v_out.to(v_out_ptr.dtype.element_ty), mask=mask)
    lse = tl.where(empty, -float("inf"), m + tl.log2(total))
    tl.store(s_out_ptr + offs_so, lse, mask=mask_r)


def merge_pair(
    v_a: Tensor,
    s_a: Tensor,
    v_b: Tensor,
    s_b: Tensor,
    v_out: Tensor,
    s_out: Tensor,
    mask: Tensor | None = None,
) -> None:
    """Launch the merge of two states; `v_out`, `s_out` may be `v_a`, `s_a`.

    Parameters
    ----------
    v_a, v_b, v_out : Tensor, shape [n, num_heads, head_dim]
        Any strides, last stride 1.
    s_a, s_b, s_out : Tensor, shape [n, num_heads], float32
    mask : Tensor or None, shape [n], bool or uint8
        Rows of the outputs to write; None writes all.
    """
    n, num_heads, head_dim = v_a.shape
    if not v_a.numel():
        return
    block_d = pow2_ceil(head_dim)
    block_r = max(1, min(pow2_ceil(n * num_heads), _TILE // block_d))
    with on_device(v_a.device):
        merge_pair_kernel[(triton.cdiv(n * num_heads, block_r),)](
            v_a,
            s_a,
            v_b,
            s_b,
            v_out,
            s_out,
            s_a if mask is None else mask,
            n * num_heads,
            num_heads,
            *kernel_strides(v_a),
            *s_a.stride(),
            *kernel_strides(v_b),
            *s_b.stride(),
            *kernel_strides(v_out),
            *s_out.stride(),
            HEAD_DIM=head_dim,
            HAS_MASK=mask is not None,
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            num_warps=4,
        )


def merge_many(v: Tensor, s: Tensor, v_out: Tensor, s_out: Tensor) -> None:
    """Launch the merge of any number of states, none included.

    Parameters
    ----------
    v : Tensor, shape [n, num_states, num_heads, head_dim]
        Any strides, last stride 1.
    s : Tensor, shape [n, num_states, num_heads], float32
    v_out : Tensor, shape [n, num_heads, head_dim]
    s_out : Tensor, shape [n, num_heads], float32
    """
    n, num_states, num_heads, head_dim = v.shape
    if not v_out.numel():
        return
    rows = n * num_heads
    block_d = pow2_ceil(head_dim)
    # Few rows get small tiles, so that all multiprocessors have work.
    block_r = max(1, min(_TILE // block_d, pow2_ceil(rows // _MANY_PROGRAMS)))
    with on_device(v.device):
        merge_many_kernel[(triton.cdiv(rows, block_r),)](
            v,
            s,
            v_out,
            s_out,
            rows,
            num_states,
            num_heads,
            *kernel_strides(v),
            *s.stride(),
            *kernel_strides(v_out),
            *s_out.stride(),
            HEAD_DIM=head_dim,
            BLOCK_R=block_r,
            BLOCK_K=max(1, min(pow2_ceil(num_states), 32)),
            BLOCK_D=block_d,
            num_warps=max(1, min(4, block_r * block_d // 512)),
        )
