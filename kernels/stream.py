"""Attention for short queries (decode, speculative decode) by workers with even shares, one launch.

    layout   q [total_q, Hq, D], strided pages of K, V -> out [total_q, Hq, Dv], lse [total_q, Hq]
    grid     one program a worker, as many as the chip holds at once
    method   a worker walks the units of its share (`stream_plan.py`); whole pairs -> out, parts ->
             slot; whoever adds the last part of a pair merges its slots, in their order

A worker cuts at most two pairs: the one it begins in (slot 2 i) and the one it ends in (slot 2 i +
1). Parts of a pair lie with consecutive workers. They are counted in groups of FAN_IN, and groups
of groups: the last to arrive merges its group into the group's first slot. Nobody waits, and the
order of a sum does not depend on who is last, so repeats agree bitwise.

With SWAPPED the tile's tokens are the rows of both products, S^T = K Q^T and O^T = V^T P^T: 64 of
them fill a Hopper matrix instruction, which the few rows of a decode's queries do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonattn.env import INTERPRET
from tritonattn.kernels._common import (
    attend,
    load_q,
    page_row,
    store_rows,
    tile_rows,
    visible_keys,
)
from tritonattn.kernels._config import (
    MAX_DECODE_Q_LEN,
    decode_tile,
    is_swapped,
    pow2_ceil,
    stream_workers,
)
from tritonattn.kernels._swapped import attend_swapped
from tritonattn.kernels.stream_plan import FIELDS, Shares, padded, worker_of, worker_start
from tritonattn.layout import PagedKVCache, PageTable, kernel_strides
from tritonattn.spec import AttentionSpec

FAN_IN: tl.constexpr = tl.constexpr(16)


@triton.jit
def _load_wide(ptr):
    low = tl.load(ptr).to(tl.int64) & 0xFFFFFFFF
    return (tl.load(ptr + 1).to(tl.int64) << 32) | low


@triton.jit
def _merge_group(
    acc_ptr, ml_ptr, first_slot, worker, step, group, count,
    ROWS: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Merge `count` states: part (group + j) * step of the pair that begins with `worker`."""
    offs_f = tl.arange(0, FAN_IN)
    offs_c = tl.arange(0, CHUNK)
    offs_m = tl.arange(0, ROWS)
    offs_dv = tl.arange(0, BLOCK_DV)
    part = (group + offs_f) * step
    slot = tl.where(part == 0, first_slot, 2 * (worker + part)).to(tl.int64)
    here = (offs_f < count)[None, :]
    at = slot[None, :] * (2 * ROWS) + offs_m[:, None]
    # Written by other multiprocessors: past the L1 cache.
    m_s = tl.load(ml_ptr + at, mask=here, other=-float("inf"), cache_modifier=".cg")
    l_s = tl.load(ml_ptr + at + ROWS, mask=here, other=0.0, cache_modifier=".cg")
    m = tl.max(m_s, 1)
    m_safe = tl.where(m == -float("inf"), 0.0, m)
    l = tl.sum(l_s * tl.exp2(m_s - m_safe[:, None]), 1)
    acc = tl.full([ROWS, BLOCK_DV], 0.0, tl.float32)
    for done in range(0, count, CHUNK):
        part_c = (group + done + offs_c) * step
        slot_c = tl.where(part_c == 0, first_slot, 2 * (worker + part_c)).to(tl.int64)
        here_c = done + offs_c < count
        m_c = tl.load(
            ml_ptr + slot_c[None, :] * (2 * ROWS) + offs_m[:, None], mask=here_c[None, :],
            other=-float("inf"), cache_modifier=".cg",
        )  # fmt: skip
        rows = slot_c[None, :, None] * ROWS + offs_m[:, None, None]
        acc_c = tl.load(
            acc_ptr + rows * BLOCK_DV + offs_dv[None, None, :], mask=here_c[None, :, None],
            other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        acc += tl.sum(acc_c * tl.exp2(m_c - m_safe[:, None])[:, :, None], 1)
    return m, l, acc


@triton.jit
def _store_state(
    acc_ptr, ml_ptr, slot, m, l, acc,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Store the first ROWS rows of a state; a tile may have more, of no query."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_m = offs_m < ROWS
    at = slot.to(tl.int64) * ROWS + offs_m
    tl.store(acc_ptr + at[:, None] * BLOCK_DV + offs_dv[None, :], acc, mask=mask_m[:, None])
    at = slot.to(tl.int64) * (2 * ROWS) + offs_m
    tl.store(ml_ptr + at, m, mask=mask_m)
    tl.store(ml_ptr + at + ROWS, l, mask=mask_m)


# A call of its own: inlined it would take registers from the loop over keys.
@triton.jit(noinline=True)
def _finish(
    out_ptr, lse_ptr, acc_ptr, ml_ptr, counters_ptr, worker, first_worker, first_slot, parts,
    num_workers, q_start, q_len, q_tile, kv_head, lse_scale, stride_out_tok, stride_out_head,
    stride_lse_tok, stride_lse_head,
    GROUP: tl.constexpr, HEAD_DIM_VO: tl.constexpr, HAS_LSE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_DV: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Count a part in; the last of a group merges it, the last of all writes the output."""
    part = worker - first_worker
    step = 1
    level = 0
    while parts > 1:
        group = (part // FAN_IN) * FAN_IN
        count = tl.minimum(parts - group, FAN_IN)
        goes_on = 1
        slot = tl.where(group == 0, first_slot, 2 * (first_worker + group * step))
        if count > 1:
            # All threads have stored their part of the state.
            tl.debug_barrier()
            counter = counters_ptr + level * 2 * num_workers + slot
            before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            goes_on = (before == count - 1).to(tl.int32)
            if goes_on != 0:
                m, l, acc = _merge_group(
                    acc_ptr, ml_ptr, first_slot, first_worker, step, group, count,
                    ROWS, BLOCK_DV, CHUNK,
                )  # fmt: skip
                # For the next layer.
                tl.store(counter, 0)
                if parts <= FAN_IN:
                    token, head, mask_m = tile_rows(q_len, q_tile, kv_head, GROUP, ROWS)
                    store_rows(
                        out_ptr, lse_ptr, m, l, acc, q_start, token, head, mask_m, lse_scale,
                        stride_out_tok, stride_out_head, stride_lse_tok, stride_lse_head,
                        HEAD_DIM_VO, HAS_LSE, BLOCK_DV,
                    )  # fmt: skip
                else:
                    # The merge has read what this overwrites.
                    tl.debug_barrier()
                    _store_state(acc_ptr, ml_ptr, slot, m, l, acc, ROWS, ROWS, BLOCK_DV)
        part = part // FAN_IN
        step = step * FAN_IN
        level += 1
        parts = tl.where(goes_on != 0, tl.cdiv(parts, FAN_IN), 0)


def _metadata(grid, kernel, args):
    return {"name": f"stream_kernel_d{args['HEAD_DIM_QK']}_g{args['GROUP']}"}


@triton.jit(launch_metadata=_metadata, do_not_specialize=["stride_table_row"])
def stream_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    acc_ptr,
    ml_ptr,
    page_ids_ptr,
    indptr_ptr,
    header_ptr,
    requests_ptr,
    workers_ptr,
    counters_ptr,
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
    SWAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Attend a worker's share of all KV tiles."""
    worker = tl.program_id(0)
    num_workers = tl.num_programs(0)
    share = workers_ptr + worker * FIELDS
    unit = _load_wide(share)
    end = _load_wide(share + 2)
    place = tl.load(share + 4)
    base = tl.load(header_ptr).to(tl.int64)
    rem = tl.load(header_ptr + 1)
    share_start = unit
    while unit < end:
        record = requests_ptr + place * FIELDS
        q_start = tl.load(record)
        q_len = tl.load(record + 1)
        kv_len = tl.load(record + 2)
        request = tl.load(record + 3)
        first_unit = _load_wide(record + 4)
        tiles = tl.maximum(tl.cdiv(kv_len, BLOCK_N), 1)
        size = padded(tiles.to(tl.int64), base, rem)
        pair = ((unit - first_unit) // size).to(tl.int32)
        pair_start = first_unit + pair * size
        q_tile = pair // NUM_KV_HEADS
        kv_head = pair % NUM_KV_HEADS
        tile_start = (unit - pair_start).to(tl.int32)
        pair_end = tl.minimum(pair_start + size, end)
        tile_end = tl.minimum((pair_end - pair_start).to(tl.int32), tiles)

        token, head, mask_m = tile_rows(q_len, q_tile, kv_head, GROUP, BLOCK_M)
        q = load_q(
            q_ptr, q_start, token, head, mask_m, stride_q_tok, stride_q_head, HEAD_DIM_QK, BLOCK_D,
            UPCAST,
        )  # fmt: skip
        limit = visible_keys(token, mask_m, q_len, kv_len, CAUSAL)
        k_head_ptr = k_ptr + tl.cast(kv_head, tl.int64) * stride_k_head
        v_head_ptr = v_ptr + tl.cast(kv_head, tl.int64) * stride_v_head
        pages = page_row(page_ids_ptr, indptr_ptr, request, stride_table_row, IS_CSR)
        kv_start = tile_start * BLOCK_N
        kv_end = tl.minimum(tile_end * BLOCK_N, kv_len)
        if SWAPPED:
            m, l, acc = attend_swapped(
                q, k_head_ptr, v_head_ptr, pages, kv_start, kv_end, limit, sm_scale_log2,
                stride_k_page, stride_k_tok, stride_v_page, stride_v_tok, HEAD_DIM_QK, HEAD_DIM_VO,
                PAGE_SIZE, UPCAST, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, NUM_STAGES,
            )  # fmt: skip
        else:
            m, l, acc = attend(
                q,
                tl.full([BLOCK_M], -float("inf"), tl.float32),
                tl.full([BLOCK_M], 0.0, tl.float32),
                tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32),
                k_head_ptr, v_head_ptr, pages, kv_start, kv_end, limit, sm_scale_log2,
                stride_k_page, stride_k_tok, stride_v_page, stride_v_tok, HEAD_DIM_QK, HEAD_DIM_VO,
                PAGE_SIZE, True, UPCAST, BLOCK_N, BLOCK_D, BLOCK_DV, NUM_STAGES,
            )  # fmt: skip
        if (tile_start == 0) & (pair_end == pair_start + size):
            store_rows(
                out_ptr, lse_ptr, m, l, acc, q_start, token, head, mask_m, lse_scale,
                stride_out_tok, stride_out_head, stride_lse_tok, stride_lse_head,
                HEAD_DIM_VO, HAS_LSE, BLOCK_DV,
            )  # fmt: skip
        else:
            first_worker = worker_of(pair_start, base, rem)
            parts = worker_of(pair_start + size - 1, base, rem) - first_worker + 1
            begins_inside = worker_start(first_worker, base, rem) < pair_start
            first_slot = 2 * first_worker + begins_inside.to(tl.int32)
            slot = 2 * worker + (unit != share_start).to(tl.int32)
            _store_state(acc_ptr, ml_ptr, slot, m, l, acc, BLOCK_M, ROWS, BLOCK_DV)
            _finish(
                out_ptr, lse_ptr, acc_ptr, ml_ptr, counters_ptr, worker, first_worker, first_slot,
                parts, num_workers, q_start, q_len, q_tile, kv_head, lse_scale, stride_out_tok,
                stride_out_head, stride_lse_tok, stride_lse_head, GROUP, HEAD_DIM_VO, HAS_LSE,
                ROWS, BLOCK_DV, CHUNK,
            )  # fmt: skip
        unit = pair_end
        pairs = tl.cdiv(q_len * GROUP, BLOCK_M) * NUM_KV_HEADS
        place += (unit >= first_unit + pairs * size).to(tl.int32)


@dataclass(frozen=True, slots=True)
class Partials:
    """Partial states, two a worker, on the device."""

    acc: Tensor  # [2 * workers, rows, Dv padded] float32
    ml: Tensor  # [2 * workers, 2, rows] float32


def _rows(spec: AttentionSpec) -> int:
    """Return how many rows of a tile can belong to queries."""
    q_len = min(spec.max_q_len, MAX_DECODE_Q_LEN)
    return min(decode_tile(spec).block_m, max(4, pow2_ceil(q_len * spec.group_size)))


def _partial_sizes(spec: AttentionSpec) -> tuple[int, int]:
    rows = 2 * stream_workers(spec) * _rows(spec)
    return rows * pow2_ceil(spec.head_dim_vo), rows * 2


def workspace_bytes(spec: AttentionSpec) -> int:
    """Return the size of the partial states of a spec, in bytes."""
    return 4 * sum(_partial_sizes(spec))


def carve(spec: AttentionSpec, workspace: Tensor) -> Partials:
    """Lay the partial states out in `workspace_bytes(spec)` bytes of uint8, whatever they hold."""
    acc, ml = workspace.view(torch.float32).split(list(_partial_sizes(spec)))
    return Partials(acc, ml)


def stream(
    spec: AttentionSpec,
    q: Tensor,
    cache: PagedKVCache,
    table: PageTable,
    shares: Shares,
    partials: Partials,
    out: Tensor,
    lse: Tensor | None,
    *,
    sm_scale_log2: float,
    lse_scale: float,
) -> None:
    """Launch the kernel.

    Parameters
    ----------
    q : Tensor, shape [total_q, num_qo_heads, head_dim_qk]
    cache : PagedKVCache
    table : PageTable
    shares : Shares
        Filled by the planner for this spec.
    partials : Partials
        Scratch; nothing in it needs to be initialised.
    out : Tensor, shape [total_q, num_qo_heads, head_dim_vo], q's dtype
        Rows of requests with short queries are written, no others.
    lse : Tensor or None, shape [total_q, num_qo_heads], float32
        Log2 units times `lse_scale`.
    """
    tile = decode_tile(spec)
    block_dv = pow2_ceil(spec.head_dim_vo)
    lse_or_out = out if lse is None else lse
    stream_kernel[(shares.workers.size(0),)](
        q,
        cache.k,
        cache.v,
        out,
        lse_or_out,
        partials.acc,
        partials.ml,
        table.page_ids,
        table.indptr if table.indptr is not None else table.page_ids,
        shares.header,
        shares.requests,
        shares.workers,
        shares.counters,
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
        SWAPPED=is_swapped(spec),
        ROWS=_rows(spec),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=pow2_ceil(spec.head_dim_qk),
        BLOCK_DV=block_dv,
        CHUNK=max(1, min(16, 4096 // (_rows(spec) * block_dv))),
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
