"""Attention of varlen queries over the paged cache, one query tile a program (portable Triton).

    layout   q [total_q, Hq, D], strided pages of K, V -> out [total_q, Hq, Dv], lse [total_q, Hq]
    grid     one program per (prefill item, KV head), items of a head side by side to share L2
    method   whole tiles that every row sees, without a mask; then the rest with one; write

Rows pack the tokens and the GQA group, so any group size fills its tiles. The work list comes from
`plan.py`; the grid is its capacity, surplus programs exit at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tritonattn.env import INTERPRET
from tritonattn.kernels._common import attend, load_q, page_row, store_rows, tile_rows, visible_keys
from tritonattn.kernels._config import pow2_ceil, prefill_tile
from tritonattn.kernels.plan import RECORD, WorkLists
from tritonattn.layout import PagedKVCache, PageTable, kernel_strides
from tritonattn.spec import AttentionSpec


def _metadata(grid, kernel, args):
    return {"name": f"prefill_kernel_d{args['HEAD_DIM_QK']}_g{args['GROUP']}"}


@triton.jit(launch_metadata=_metadata, do_not_specialize=["num_items", "stride_table_row"])
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    page_ids_ptr,
    indptr_ptr,
    work_ptr,
    num_items,
    sm_scale_log2,
    lse_scale,
    stride_q_tok,
    stride_q_head,
    stride_k_page,
    stride_k_tok,
    stride_k_head,
    stride_v_page,
    stride_v_tok,
    stride_v_head,
    stride_out_tok,
    stride_out_head,
    stride_lse_tok,
    stride_lse_head,
    stride_table_row,
    GROUP: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    IS_CSR: tl.constexpr,
    HAS_LSE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Attend all visible keys for one query tile and KV head."""
    record = work_ptr + (tl.program_id(0) % num_items) * RECORD
    kv_head = tl.program_id(0) // num_items
    q_len = tl.load(record + 1)
    if q_len == 0:
        return
    q_start = tl.load(record)
    q_tile = tl.load(record + 2)
    kv_end = tl.load(record + 4)
    kv_len = tl.load(record + 5)
    request = tl.load(record + 6)

    token, head, mask_m = tile_rows(q_len, q_tile, kv_head, GROUP, BLOCK_M)
    q = load_q(
        q_ptr,
        q_start,
        token,
        head,
        mask_m,
        stride_q_tok,
        stride_q_head,
        HEAD_DIM_QK,
        BLOCK_D,
        UPCAST,
    )
    limit = visible_keys(token, mask_m, q_len, kv_len, CAUSAL)
    if CAUSAL:
        seen_by_all = tl.maximum(kv_len - q_len + q_tile * BLOCK_M // GROUP + 1, 0)
    else:
        seen_by_all = kv_len
    kv_unmasked = tl.minimum(seen_by_all, kv_end) // BLOCK_N * BLOCK_N

    k_ptr += tl.cast(kv_head, tl.int64) * stride_k_head
    v_ptr += tl.cast(kv_head, tl.int64) * stride_v_head
    page_row_ptr = page_row(page_ids_ptr, indptr_ptr, request, stride_table_row, IS_CSR)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
    m, l, acc = attend(
        q, m, l, acc, k_ptr, v_ptr, page_row_ptr, 0, kv_unmasked, limit, sm_scale_log2,
        stride_k_page, stride_k_tok, stride_v_page, stride_v_tok,
        HEAD_DIM_QK, HEAD_DIM_VO, PAGE_SIZE, False, UPCAST, BLOCK_N, BLOCK_D, BLOCK_DV, NUM_STAGES,
    )  # fmt: skip
    m, l, acc = attend(
        q, m, l, acc, k_ptr, v_ptr, page_row_ptr, kv_unmasked, kv_end, limit, sm_scale_log2,
        stride_k_page, stride_k_tok, stride_v_page, stride_v_tok,
        HEAD_DIM_QK, HEAD_DIM_VO, PAGE_SIZE, True, UPCAST, BLOCK_N, BLOCK_D, BLOCK_DV, NUM_STAGES,
    )  # fmt: skip
    store_rows(
        out_ptr, lse_ptr, m, l, acc, q_start, token, head, mask_m, lse_scale,
        stride_out_tok, stride_out_head, stride_lse_tok, stride_lse_head,
        HEAD_DIM_VO, HAS_LSE, BLOCK_DV,
    )  # fmt: skip


def prefill(
    spec: AttentionSpec,
    q: Tensor,
    cache: PagedKVCache,
    table: PageTable,
    work: WorkLists,
    out: Tensor,
    lse: Tensor | None,
    *,
    sm_scale_log2: float,
    lse_scale: float,
) -> None:
    """Launch the kernel over the prefill list.

    Parameters
    ----------
    q : Tensor, shape [total_q, num_qo_heads, head_dim_qk]
    cache : PagedKVCache
    table : PageTable
    work : WorkLists
        Filled by the planner for this spec.
    out : Tensor, shape [total_q, num_qo_heads, head_dim_vo], q's dtype
        Rows of requests on the prefill path are written, no others.
    lse : Tensor or None, shape [total_q, num_qo_heads], float32
        Log2 units times `lse_scale`.
    """
    tile = prefill_tile(spec)
    lse_or_out = out if lse is None else lse
    prefill_kernel[(work.capacity.prefill * spec.num_kv_heads,)](
        q,
        cache.k,
        cache.v,
        out,
        lse_or_out,
        table.page_ids,
        table.indptr if table.indptr is not None else table.page_ids,
        work.prefill,
        work.capacity.prefill,
        sm_scale_log2,
        lse_scale,
        *kernel_strides(q),
        *kernel_strides(cache.k),
        *kernel_strides(cache.v),
        *kernel_strides(out),
        *(lse_or_out.stride()[:2]),
        0 if table.is_csr else table.page_ids.stride(0),
        GROUP=spec.group_size,
        HEAD_DIM_QK=spec.head_dim_qk,
        HEAD_DIM_VO=spec.head_dim_vo,
        PAGE_SIZE=spec.page_size,
        CAUSAL=spec.causal,
        IS_CSR=table.is_csr,
        HAS_LSE=lse is not None,
        UPCAST=INTERPRET,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=pow2_ceil(spec.head_dim_qk),
        BLOCK_DV=pow2_ceil(spec.head_dim_vo),
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
