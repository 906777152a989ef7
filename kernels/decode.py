"""Split-KV attention for short queries (decode, speculative decode), and the merge of its splits.

    layout   q [total_q, Hq, D], strided pages of K, V -> out [total_q, Hq, Dv], lse [total_q, Hq]
    grid     split: one program per (split item, KV head); merge: per (merge item, KV head, row)
    method   rows of a GQA group share a tile; state (m, l, acc) over the item's keys;
             whole request -> out, else -> slot; merge: weights 2^(m_i - max m) over the slots

The work lists come from `plan.py`; grids are their capacities, surplus programs exit at once.
Partial states are fp32 in the workspace: acc [slots, Hkv, BLOCK_M, Dv padded], then m and l [slots,
Hkv, 2, BLOCK_M].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonattn.env import INTERPRET
from tritonattn.kernels._common import attend, load_q, page_row, store_rows, tile_rows, visible_keys
from tritonattn.kernels._config import decode_tile, pow2_ceil
from tritonattn.kernels.plan import RECORD, WorkCapacity, WorkLists
from tritonattn.layout import PagedKVCache, PageTable, kernel_strides
from tritonattn.spec import AttentionSpec


def _split_metadata(grid, kernel, args):
    return {"name": f"decode_split_kernel_d{args['HEAD_DIM_QK']}_g{args['GROUP']}"}


@triton.jit(launch_metadata=_split_metadata, do_not_specialize=["stride_table_row"])
def decode_split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    acc_ptr,
    ml_ptr,
    page_ids_ptr,
    indptr_ptr,
    work_ptr,
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
    NUM_KV_HEADS: tl.constexpr,
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
    """Attend one chunk of keys for one query tile and KV head."""
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    record = work_ptr + (tl.program_id(0) // NUM_KV_HEADS) * RECORD
    q_len = tl.load(record + 1)
    if q_len == 0:
        return
    q_start = tl.load(record)
    q_tile = tl.load(record + 2)
    kv_start = tl.load(record + 3)
    kv_end = tl.load(record + 4)
    kv_len = tl.load(record + 5)
    request = tl.load(record + 6)
    slot = tl.load(record + 7)

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
    m, l, acc = attend(
        q,
        tl.full([BLOCK_M], -float("inf"), tl.float32),
        tl.full([BLOCK_M], 0.0, tl.float32),
        tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32),
        k_ptr + tl.cast(kv_head, tl.int64) * stride_k_head,
        v_ptr + tl.cast(kv_head, tl.int64) * stride_v_head,
        page_row(page_ids_ptr, indptr_ptr, request, stride_table_row, IS_CSR),
        kv_start,
        kv_end,
        limit,
        sm_scale_log2,
        stride_k_page,
        stride_k_tok,
        stride_v_page,
        stride_v_tok,
        HEAD_DIM_QK,
        HEAD_DIM_VO,
        PAGE_SIZE,
        True,
        UPCAST,
        BLOCK_N,
        BLOCK_D,
        BLOCK_DV,
        NUM_STAGES,
    )
    if slot < 0:
        store_rows(
            out_ptr, lse_ptr, m, l, acc, q_start, token, head, mask_m, lse_scale,
            stride_out_tok, stride_out_head, stride_lse_tok, stride_lse_head,
            HEAD_DIM_VO, HAS_LSE, BLOCK_DV,
        )  # fmt: skip
    else:
        offs_m = tl.arange(0, BLOCK_M)
        offs_dv = tl.arange(0, BLOCK_DV)
        state = slot.to(tl.int64) * NUM_KV_HEADS + kv_head
        offs_acc = (state * BLOCK_M + offs_m)[:, None] * BLOCK_DV + offs_dv[None, :]
        tl.store(acc_ptr + offs_acc, acc, mask=mask_m[:, None])
        tl.store(ml_ptr + state * (2 * BLOCK_M) + offs_m, m, mask=mask_m)
        tl.store(ml_ptr + state * (2 * BLOCK_M) + BLOCK_M + offs_m, l, mask=mask_m)


def _merge_metadata(grid, kernel, args):
    return {"name": f"decode_merge_kernel_d{args['HEAD_DIM_VO']}_g{args['GROUP']}"}


@triton.jit(launch_metadata=_merge_metadata)
def decode_merge_kernel(
    out_ptr,
    lse_ptr,
    acc_ptr,
    ml_ptr,
    work_ptr,
    lse_scale,
    stride_out_tok,
    stride_out_head,
    stride_lse_tok,
    stride_lse_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    HAS_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Merge the partial states of a row, in the order of slots, so that repeats agree bitwise."""
    row = tl.program_id(0) % BLOCK_M
    kv_head = tl.program_id(0) // BLOCK_M % NUM_KV_HEADS
    record = work_ptr + tl.program_id(0) // (BLOCK_M * NUM_KV_HEADS) * RECORD
    q_len = tl.load(record + 1)
    tile_row = tl.load(record + 2) * BLOCK_M + row
    token = tile_row // GROUP
    if token >= q_len:
        return
    first = tl.load(record + 3)
    count = tl.load(record + 4)

    offs_s = tl.arange(0, BLOCK_S)
    offs_dv = tl.arange(0, BLOCK_DV)
    m = -float("inf")
    l = 0.0
    acc = tl.full([BLOCK_DV], 0.0, tl.float32)
    for done in range(0, count, BLOCK_S):
        mask_s = done + offs_s < count
        state = (first + done + offs_s).to(tl.int64) * NUM_KV_HEADS + kv_head
        m_s = tl.load(ml_ptr + state * (2 * BLOCK_M) + row, mask=mask_s, other=-float("inf"))
        l_s = tl.load(ml_ptr + state * (2 * BLOCK_M) + BLOCK_M + row, mask=mask_s, other=0.0)
        offs_acc = (state * BLOCK_M + row)[:, None] * BLOCK_DV + offs_dv[None, :]
        acc_s = tl.load(acc_ptr + offs_acc, mask=mask_s[:, None], other=0.0)
        m_new = tl.maximum(m, tl.max(m_s, 0))
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_safe)
        weight = tl.exp2(m_s - m_safe)
        l = l * alpha + tl.sum(l_s * weight, 0)
        acc = acc * alpha + tl.sum(acc_s * weight[:, None], 0)
        m = m_new

    empty = l == 0.0
    out = acc * tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, l))
    out_row = (tl.load(record) + token).to(tl.int64)
    head = (kv_head * GROUP + tile_row % GROUP).to(tl.int64)
    offs_out = out_row * stride_out_tok + head * stride_out_head + offs_dv
    tl.store(out_ptr + offs_out, out.to(out_ptr.dtype.element_ty), mask=offs_dv < HEAD_DIM_VO)
    if HAS_LSE:
        lse = tl.where(empty, -float("inf"), (m + tl.log2(tl.where(empty, 1.0, l))) * lse_scale)
        tl.store(lse_ptr + out_row * stride_lse_tok + head * stride_lse_head, lse)


@dataclass(frozen=True, slots=True)
class Partials:
    """Partial states of split requests, on the device."""

    acc: Tensor  # [slots, Hkv, BLOCK_M, Dv padded] float32
    ml: Tensor  # [slots, Hkv, 2, BLOCK_M] float32


def _partial_sizes(spec: AttentionSpec) -> tuple[int, int]:
    rows = WorkCapacity.of(spec).slots * spec.num_kv_heads * decode_tile(spec).block_m
    return rows * pow2_ceil(spec.head_dim_vo), rows * 2


def workspace_bytes(spec: AttentionSpec) -> int:
    """Return the size of the partial states of a spec, in bytes."""
    return 4 * sum(_partial_sizes(spec))


def carve(spec: AttentionSpec, workspace: Tensor) -> Partials:
    """Lay the partial states out in `workspace_bytes(spec)` bytes of uint8, whatever they hold."""
    acc, ml = workspace.view(torch.float32).split(list(_partial_sizes(spec)))
    return Partials(acc, ml)


def decode(
    spec: AttentionSpec,
    q: Tensor,
    cache: PagedKVCache,
    table: PageTable,
    work: WorkLists,
    partials: Partials,
    out: Tensor,
    lse: Tensor | None,
    *,
    sm_scale_log2: float,
    lse_scale: float,
) -> None:
    """Launch the split kernel and, where a split is possible, the merge.

    Parameters
    ----------
    q : Tensor, shape [total_q, num_qo_heads, head_dim_qk]
    cache : PagedKVCache
    table : PageTable
    work : WorkLists
        Filled by the planner for this spec.
    partials : Partials
        Scratch; nothing in it needs to be initialised.
    out : Tensor, shape [total_q, num_qo_heads, head_dim_vo], q's dtype
        Rows of requests on the split path are written, no others.
    lse : Tensor or None, shape [total_q, num_qo_heads], float32
        Log2 units times `lse_scale`.
    """
    tile = decode_tile(spec)
    block_dv = pow2_ceil(spec.head_dim_vo)
    lse_or_out = out if lse is None else lse
    decode_split_kernel[(work.capacity.split * spec.num_kv_heads,)](
        q,
        cache.k,
        cache.v,
        out,
        lse_or_out,
        partials.acc,
        partials.ml,
        table.page_ids,
        table.indptr if table.indptr is not None else table.page_ids,
        work.split,
        sm_scale_log2,
        lse_scale,
        *kernel_strides(q),
        *kernel_strides(cache.k),
        *kernel_strides(cache.v),
        *kernel_strides(out),
        *(lse_or_out.stride()[:2]),
        0 if table.is_csr else table.page_ids.stride(0),
        NUM_KV_HEADS=spec.num_kv_heads,
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
        BLOCK_DV=block_dv,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    if work.capacity.merge:
        decode_merge_kernel[(work.capacity.merge * spec.num_kv_heads * tile.block_m,)](
            out,
            lse_or_out,
            partials.acc,
            partials.ml,
            work.merge,
            lse_scale,
            *kernel_strides(out),
            *(lse_or_out.stride()[:2]),
            NUM_KV_HEADS=spec.num_kv_heads,
            GROUP=spec.group_size,
            HEAD_DIM_VO=spec.head_dim_vo,
            HAS_LSE=lse is not None,
            BLOCK_M=tile.block_m,
            BLOCK_DV=block_dv,
            BLOCK_S=16,
            num_warps=4,
        )
