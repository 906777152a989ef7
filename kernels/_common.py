"""Jit helpers that the attention kernels share: addressing, the tile loop, the softmax numerics.

Numerics: logits and softmax in fp32, base 2 with `sm_scale * log2(e)` folded into one factor; the
state of a row is (m, l, acc) with m the running maximum in log2 units, l the sum of exp2(logit - m)
and acc the unnormalised output (online softmax, Milakov and Gimelshein 2018; split and merged as in
Flash-Decoding). Masked logits are a true -inf, never a finite stand-in, so that any finite logit
outweighs a masked one.

Rows of a query tile are (token, head of the GQA group) pairs: row r is token r // GROUP, head r %
GROUP.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_rows(q_len, q_tile, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return token, query head and mask of each row of a query tile."""
    row = q_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    return token, kv_head * GROUP + row % GROUP, token < q_len


@triton.jit
def load_q(
    q_ptr,
    q_start,
    token,
    head,
    mask_m,
    stride_q_tok,
    stride_q_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Load the rows of a query tile, 0 where masked."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_row = (q_start + token).to(tl.int64) * stride_q_tok + head.to(tl.int64) * stride_q_head
    mask = mask_m[:, None] & (offs_d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + offs_row[:, None] + offs_d[None, :], mask=mask, other=0.0)
    return q.to(tl.float32) if UPCAST else q


@triton.jit
def visible_keys(token, mask_m, q_len, kv_len, CAUSAL: tl.constexpr):
    """Return how many keys each row sees: keys [0, n). Causal is aligned to the bottom right."""
    if CAUSAL:
        limit = kv_len - q_len + token + 1
    else:
        limit = kv_len + token * 0
    return tl.where(mask_m, limit, 0)


@triton.jit
def page_row(page_ids_ptr, indptr_ptr, request, stride_table_row, IS_CSR: tl.constexpr):
    """Return the address of a request's first page id."""
    if IS_CSR:
        return page_ids_ptr + tl.maximum(tl.load(indptr_ptr + request), 0)
    else:
        return page_ids_ptr + request.to(tl.int64) * stride_table_row


@triton.jit
def attend(
    q,
    m,
    l,
    acc,
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
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Fold keys [kv_start, kv_end) of one request and head into the state of a query tile.

    `kv_start` is a multiple of BLOCK_N. Without MASKED every row must see every key of the range
    and the range must be whole tiles. Nothing outside the range is read: its slots may hold
    anything.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_d = (offs_d < HEAD_DIM_QK)[None, :]
    mask_dv = (offs_dv < HEAD_DIM_VO)[None, :]
    key = kv_start + offs_n
    # Page ids are loaded one tile ahead: the K and V addresses of a tile must not wait for them.
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
        if MASKED:
            # V is masked as well: a stray NaN would survive its zero probability.
            mask_n = (key < kv_end)[:, None]
            k = tl.load(k_ptr + offs_k[:, None] + offs_d[None, :], mask=mask_n & mask_d, other=0.0)
            v = tl.load(
                v_ptr + offs_v[:, None] + offs_dv[None, :], mask=mask_n & mask_dv, other=0.0
            )
        else:
            k = tl.load(k_ptr + offs_k[:, None] + offs_d[None, :], mask=mask_d, other=0.0)
            v = tl.load(v_ptr + offs_v[:, None] + offs_dv[None, :], mask=mask_dv, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * sm_scale_log2
        if MASKED:
            s = tl.where(key[None, :] < limit[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        # A row that has seen no key yet has m = -inf; exp2(-inf - 0) is the 0 it needs.
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(s - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m = m_new
    return m, l, acc


@triton.jit
def store_rows(
    out_ptr,
    lse_ptr,
    m,
    l,
    acc,
    q_start,
    token,
    head,
    mask_m,
    lse_scale,
    stride_out_tok,
    stride_out_head,
    stride_lse_tok,
    stride_lse_head,
    HEAD_DIM: tl.constexpr,
    HAS_LSE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Normalise a state and write output and LSE; rows that saw no key give 0 and -inf."""
    offs_dv = tl.arange(0, BLOCK_DV)
    row = (q_start + token).to(tl.int64)
    head = head.to(tl.int64)
    empty = l == 0.0
    out = acc * tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, l))[:, None]
    offs_out = row * stride_out_tok + head * stride_out_head
    mask = mask_m[:, None] & (offs_dv < HEAD_DIM)[None, :]
    tl.store(
        out_ptr + offs_out[:, None] + offs_dv[None, :], out.to(out_ptr.dtype.element_ty), mask=mask
    )
    if HAS_LSE:
        lse = tl.where(empty, -float("inf"), (m + tl.log2(tl.where(empty, 1.0, l))) * lse_scale)
        tl.store(lse_ptr + row * stride_lse_tok + head * stride_lse_head, lse, mask=mask_m)
