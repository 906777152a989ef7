"""The tile loop of `_common.attend` with the tokens of a tile as the rows of both products."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_swapped(
    q,
    k_ptr,
    v_ptr,
    page_row_ptr,
    kv_start,
    kv_end,
    limit,
    sm_scale_log2,
    stride_k_page,
    stride_k_tok,
    stride_v_page,
    stride_v_tok,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Attend keys [kv_start, kv_end) like `attend`, from an empty state, tokens as rows."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_d = (offs_d < HEAD_DIM_QK)[None, :]
    mask_dv = (offs_dv < HEAD_DIM_VO)[None, :]
    q_t = tl.trans(q)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    # Summed over tokens at the end only, if the registers allow it.
    SUM_LATER: tl.constexpr = BLOCK_M <= 16
    if SUM_LATER:
        l = tl.full([BLOCK_N, BLOCK_M], 0.0, tl.float32)
    else:
        l = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_DV, BLOCK_M], 0.0, tl.float32)
    key = kv_start + offs_n
    page = tl.load(page_row_ptr + key // PAGE_SIZE, mask=key < kv_end, other=0)
    for start in tl.range(kv_start, kv_end, BLOCK_N, num_stages=NUM_STAGES):
        key = start + offs_n
        page_now = page.to(tl.int64)
        ahead = key + BLOCK_N
        page = tl.load(page_row_ptr + ahead // PAGE_SIZE, mask=ahead < kv_end, other=0)
        if BLOCK_N % PAGE_SIZE == 0:
            slot = (offs_n % PAGE_SIZE).to(tl.int64)
        else:
            slot = (key % PAGE_SIZE).to(tl.int64)
        offs_k = page_now * stride_k_page + slot * stride_k_tok
        offs_v = page_now * stride_v_page + slot * stride_v_tok
        mask_n = (key < kv_end)[:, None]
        k = tl.load(k_ptr + offs_k[:, None] + offs_d[None, :], mask=mask_n & mask_d, other=0.0)
        v = tl.load(v_ptr + offs_v[:, None] + offs_dv[None, :], mask=mask_n & mask_dv, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        s = tl.dot(k, q_t, input_precision="ieee") * sm_scale_log2
        s = tl.where(key[:, None] < limit[None, :], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(s - m_safe[None, :])
        alpha = tl.exp2(m - m_safe)
        if SUM_LATER:
            l = l * alpha[None, :] + p
        else:
            l = l * alpha + tl.sum(p, 0)
        acc = acc * alpha[None, :]
        acc = tl.dot(tl.trans(v), p.to(v.dtype), acc, input_precision="ieee")
        m = m_new
    if SUM_LATER:
        l = tl.sum(l, 0)
    return m, l, tl.trans(acc)
