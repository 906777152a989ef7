"""Work lists of a step, made on the device from the lengths.

    layout   qo_indptr [batch + 1], lengths [batch], indptr [batch + 1] -> three int32 lists
    grid     one program
    method   tiles per request -> chunk size from their sum -> prefix sums -> binary search

A request with at most MAX_DECODE_Q_LEN query tokens is cut into (query tile, KV chunk) items, a
longer one into query tiles. Chunks are equal: the tiles of all requests over the programs wanted,
so that no request costs more than its share. Each KV head runs the same list. All entries up to
capacity are written at every launch; surplus ones have q_len 0, which the attention kernels skip.

    split and prefill item   q_start, q_len, q_tile, kv_start, kv_end, kv_len, request, slot
    merge item               q_start, q_len, q_tile, first slot, number of slots, -, -, -

A split item whose slot is -1 holds all keys of its rows and writes the output itself; the others
leave a partial state in their slot, and a merge item names the slots of one query tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonattn.kernels._config import (
    MAX_DECODE_Q_LEN,
    decode_tile,
    prefill_tile,
    split_programs,
)
from tritonattn.layout import PageTable
from tritonattn.spec import AttentionSpec

RECORD: tl.constexpr = tl.constexpr(8)  # int32 fields of an item
RECORD_FIELDS = 8


@triton.jit
def _lengths(
    qo_indptr_ptr,
    lengths_ptr,
    indptr_ptr,
    request,
    mask,
    total_q,
    table_width,
    PAGE_SIZE: tl.constexpr,
    IS_CSR: tl.constexpr,
    FROM_LAST_PAGE_LEN: tl.constexpr,
):
    """Return q_start, q_len and kv_len, clamped to the rows of q and to the table."""
    q_start = tl.load(qo_indptr_ptr + request, mask=mask, other=0)
    q_end = tl.load(qo_indptr_ptr + request + 1, mask=mask, other=0)
    q_start = tl.maximum(q_start, 0)
    q_len = tl.maximum(tl.minimum(q_end, total_q) - q_start, 0)
    length = tl.load(lengths_ptr + request, mask=mask, other=0).to(tl.int64)
    if IS_CSR:
        begin = tl.load(indptr_ptr + request, mask=mask, other=0)
        end = tl.load(indptr_ptr + request + 1, mask=mask, other=0)
        pages = tl.maximum(tl.minimum(end, table_width) - tl.maximum(begin, 0), 0)
    else:
        pages = table_width
    room = (pages + 0 * request).to(tl.int64) * PAGE_SIZE
    if FROM_LAST_PAGE_LEN:
        last = tl.minimum(tl.maximum(length, 0), PAGE_SIZE)
        kv_len = tl.where(room > 0, room - PAGE_SIZE + last, 0)
    else:
        kv_len = tl.minimum(tl.maximum(length, 0), room)
    return q_start, q_len, kv_len.to(tl.int32)


@triton.jit
def _splits(kv_len, chunk_tiles, BLOCK_N: tl.constexpr):
    """Return into how many chunks the keys of a request are cut, at least 1."""
    return tl.maximum(tl.cdiv(tl.cdiv(kv_len, BLOCK_N), chunk_tiles), 1)


@triton.jit
def _shares(
    q_len,
    kv_len,
    chunk_tiles,
    GROUP: tl.constexpr,
    MAX_DECODE_Q: tl.constexpr,
    DECODE_BLOCK_M: tl.constexpr,
    DECODE_BLOCK_N: tl.constexpr,
    PREFILL_BLOCK_M: tl.constexpr,
):
    """Return query tiles and splits of a request on the split path, query tiles on the other."""
    is_decode = q_len <= MAX_DECODE_Q
    q_tiles = tl.where(is_decode, tl.cdiv(q_len * GROUP, DECODE_BLOCK_M), 0)
    splits = _splits(kv_len, chunk_tiles, DECODE_BLOCK_N)
    return q_tiles, splits, tl.where(is_decode, 0, tl.cdiv(q_len * GROUP, PREFILL_BLOCK_M))


@triton.jit
def _find(cum_ptr, item, batch_size, STEPS: tl.constexpr):
    """Return the last request whose first item is not after `item`."""
    low = item * 0
    for step in tl.static_range(STEPS):
        probe = low + (1 << (STEPS - 1 - step))
        first = tl.load(cum_ptr + probe, mask=probe < batch_size, other=2147483647)
        low = tl.where(first <= item, probe, low)
    return low


@triton.jit
def _locate(
    cum_ptr,
    item,
    num_items,
    qo_indptr_ptr,
    lengths_ptr,
    indptr_ptr,
    batch_size,
    total_q,
    table_width,
    PAGE_SIZE: tl.constexpr,
    IS_CSR: tl.constexpr,
    FROM_LAST_PAGE_LEN: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Return an item's request, its rank there, and the lengths; q_len is 0 for surplus items."""
    live = item < num_items
    request = _find(cum_ptr, item, batch_size, STEPS)
    q_start, q_len, kv_len = _lengths(
        qo_indptr_ptr, lengths_ptr, indptr_ptr, request, live, total_q, table_width,
        PAGE_SIZE, IS_CSR, FROM_LAST_PAGE_LEN,
    )  # fmt: skip
    rank = item - tl.load(cum_ptr + request, mask=live, other=0)
    return request, rank, q_start, tl.where(live, q_len, 0), kv_len


@triton.jit
def _store_record(list_ptr, item, mask, f0, f1, f2, f3, f4, f5, f6, f7):
    record = list_ptr + item * RECORD
    tl.store(record, f0, mask=mask)
    tl.store(record + 1, f1, mask=mask)
    tl.store(record + 2, f2, mask=mask)
    tl.store(record + 3, f3, mask=mask)
    tl.store(record + 4, f4, mask=mask)
    tl.store(record + 5, f5, mask=mask)
    tl.store(record + 6, f6, mask=mask)
    tl.store(record + 7, f7, mask=mask)


def _metadata(grid, kernel, args):
    return {"name": f"plan_kernel_b{args['batch_size']}"}


@triton.jit(
    launch_metadata=_metadata,
    do_not_specialize=[
        "batch_size",
        "total_q",
        "table_width",
        "programs",
        "split_capacity",
        "merge_capacity",
        "prefill_capacity",
    ],
)
def plan_kernel(
    qo_indptr_ptr,
    lengths_ptr,
    indptr_ptr,
    cum_ptr,
    split_ptr,
    merge_ptr,
    prefill_ptr,
    batch_size,
    total_q,
    table_width,
    programs,
    split_capacity,
    merge_capacity,
    prefill_capacity,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    IS_CSR: tl.constexpr,
    FROM_LAST_PAGE_LEN: tl.constexpr,
    MAX_DECODE_Q: tl.constexpr,
    DECODE_BLOCK_M: tl.constexpr,
    DECODE_BLOCK_N: tl.constexpr,
    PREFILL_BLOCK_M: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill the three lists of the module docstring. `cum_ptr` is scratch, [4, batch_size] int32."""
    offs = tl.arange(0, BLOCK)
    tiles = tl.zeros([BLOCK], tl.int64)
    for first in range(0, batch_size, BLOCK):
        request = first + offs
        mask = request < batch_size
        _, q_len, kv_len = _lengths(
            qo_indptr_ptr, lengths_ptr, indptr_ptr, request, mask, total_q, table_width,
            PAGE_SIZE, IS_CSR, FROM_LAST_PAGE_LEN,
        )  # fmt: skip
        q_tiles, _, _ = _shares(
            q_len, kv_len, 1, GROUP, MAX_DECODE_Q, DECODE_BLOCK_M, DECODE_BLOCK_N, PREFILL_BLOCK_M
        )
        tiles += tl.where(mask, q_tiles.to(tl.int64) * tl.cdiv(kv_len, DECODE_BLOCK_N), 0)
    total = tl.sum(tiles, 0) * NUM_KV_HEADS
    chunk_tiles = tl.maximum((total + programs - 1) // programs, 1).to(tl.int32)

    num_split = 0
    num_slots = 0
    num_merge = 0
    num_prefill = 0
    for first in range(0, batch_size, BLOCK):
        request = first + offs
        mask = request < batch_size
        _, q_len, kv_len = _lengths(
            qo_indptr_ptr, lengths_ptr, indptr_ptr, request, mask, total_q, table_width,
            PAGE_SIZE, IS_CSR, FROM_LAST_PAGE_LEN,
        )  # fmt: skip
        q_len = tl.where(mask, q_len, 0)
        q_tiles, splits, prefill_tiles = _shares(
            q_len, kv_len, chunk_tiles, GROUP, MAX_DECODE_Q, DECODE_BLOCK_M, DECODE_BLOCK_N,
            PREFILL_BLOCK_M,
        )  # fmt: skip
        items = q_tiles * splits
        slots = tl.where(splits > 1, items, 0)
        merges = tl.where(splits > 1, q_tiles, 0)
        cum = cum_ptr + request
        tl.store(cum, num_split + tl.cumsum(items, 0) - items, mask=mask)
        tl.store(cum + batch_size, num_slots + tl.cumsum(slots, 0) - slots, mask=mask)
        tl.store(cum + 2 * batch_size, num_merge + tl.cumsum(merges, 0) - merges, mask=mask)
        tl.store(
            cum + 3 * batch_size,
            num_prefill + tl.cumsum(prefill_tiles, 0) - prefill_tiles,
            mask=mask,
        )
        num_split += tl.sum(items, 0)
        num_slots += tl.sum(slots, 0)
        num_merge += tl.sum(merges, 0)
        num_prefill += tl.sum(prefill_tiles, 0)
    # The prefix sums were written by other threads of this program.
    tl.debug_barrier()

    for first in range(0, split_capacity, BLOCK):
        item = first + offs
        request, rank, q_start, q_len, kv_len = _locate(
            cum_ptr, item, num_split, qo_indptr_ptr, lengths_ptr, indptr_ptr, batch_size, total_q,
            table_width, PAGE_SIZE, IS_CSR, FROM_LAST_PAGE_LEN, SEARCH_STEPS,
        )  # fmt: skip
        splits = _splits(kv_len, chunk_tiles, DECODE_BLOCK_N)
        slot = rank + tl.load(cum_ptr + batch_size + request, mask=item < num_split, other=0)
        size = tl.cdiv(tl.cdiv(kv_len, DECODE_BLOCK_N), splits) * DECODE_BLOCK_N
        kv_start = (rank % splits) * size
        _store_record(
            split_ptr, item, item < split_capacity, q_start, q_len, rank // splits, kv_start,
            tl.minimum(kv_start + size, kv_len), kv_len, request, tl.where(splits > 1, slot, -1),
        )  # fmt: skip

    for first in range(0, merge_capacity, BLOCK):
        item = first + offs
        request, q_tile, q_start, q_len, kv_len = _locate(
            cum_ptr + 2 * batch_size, item, num_merge, qo_indptr_ptr, lengths_ptr, indptr_ptr,
            batch_size, total_q, table_width, PAGE_SIZE, IS_CSR, FROM_LAST_PAGE_LEN, SEARCH_STEPS,
        )  # fmt: skip
        splits = _splits(kv_len, chunk_tiles, DECODE_BLOCK_N)
        first_slot = tl.load(cum_ptr + batch_size + request, mask=item < num_merge, other=0)
        _store_record(
            merge_ptr, item, item < merge_capacity, q_start, q_len, q_tile,
            first_slot + q_tile * splits, splits, 0, 0, 0,
        )  # fmt: skip

    for first in range(0, prefill_capacity, BLOCK):
        item = first + offs
        request, rank, q_start, q_len, kv_len = _locate(
            cum_ptr + 3 * batch_size, item, num_prefill, qo_indptr_ptr, lengths_ptr, indptr_ptr,
            batch_size, total_q, table_width, PAGE_SIZE, IS_CSR, FROM_LAST_PAGE_LEN, SEARCH_STEPS,
        )  # fmt: skip
        # Last tile first: with a causal mask it has the most keys, and long work should start
        # early.
        q_tile = tl.cdiv(q_len * GROUP, PREFILL_BLOCK_M) - 1 - rank
        if CAUSAL:
            last_row = tl.minimum((q_tile + 1) * PREFILL_BLOCK_M, q_len * GROUP) - 1
            kv_end = tl.maximum(kv_len - q_len + last_row // GROUP + 1, 0)
        else:
            kv_end = kv_len
        _store_record(
            prefill_ptr, item, item < prefill_capacity, q_start, q_len, q_tile, 0, kv_end, kv_len,
            request, -1,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkCapacity:
    """List lengths that no batch of a spec's shape can exceed; grids are made from them."""

    split: int  # (query tile, KV chunk) items
    slots: int  # partial states
    merge: int  # query tiles that were split
    prefill: int  # query tiles

    @classmethod
    def of(cls, spec: AttentionSpec) -> WorkCapacity:
        """Bound the lists.

        With T tiles in all, a chunk has at least T * num_kv_heads / programs of them, so cutting
        adds at most `programs / num_kv_heads` items to one per query tile, and only a query tile
        with more than a chunk is cut.
        """
        shares = split_programs(spec) // spec.num_kv_heads
        rows = spec.total_q * spec.group_size
        q_len = min(spec.max_q_len, MAX_DECODE_Q_LEN)
        nonempty = min(spec.batch_size, spec.total_q)
        tile = decode_tile(spec)
        q_tiles = min(
            nonempty * -(-q_len * spec.group_size // tile.block_m), rows // tile.block_m + nonempty
        )
        long_requests = min(spec.batch_size, spec.total_q // (MAX_DECODE_Q_LEN + 1))
        has_prefill = spec.max_q_len > MAX_DECODE_Q_LEN
        # Slots are bounded for any metadata, also where `max_q_len` is a lie: they are written to.
        return cls(
            split=q_tiles + shares,
            slots=2 * shares,
            merge=min(shares, q_tiles),
            prefill=rows // prefill_tile(spec).block_m + long_requests if has_prefill else 0,
        )


@dataclass(frozen=True, slots=True)
class WorkLists:
    """The lists of one step, on the device."""

    split: Tensor  # [capacity.split, 8] int32
    merge: Tensor  # [capacity.merge, 8] int32
    prefill: Tensor  # [capacity.prefill, 8] int32
    cum: Tensor  # [4, batch] int32, scratch of the planner
    capacity: WorkCapacity


def workspace_bytes(spec: AttentionSpec) -> int:
    """Return the size of the work lists of a spec, in bytes."""
    capacity = WorkCapacity.of(spec)
    records = capacity.split + capacity.merge + capacity.prefill
    return 4 * (RECORD_FIELDS * records + 4 * spec.batch_size)


def carve(spec: AttentionSpec, workspace: Tensor) -> WorkLists:
    """Lay the lists out in `workspace_bytes(spec)` bytes of uint8, whatever they hold."""
    capacity = WorkCapacity.of(spec)
    words = workspace.view(torch.int32)
    sizes = [RECORD_FIELDS * n for n in (capacity.split, capacity.merge, capacity.prefill)]
    split, merge, prefill, cum = words.split([*sizes, 4 * spec.batch_size])
    return WorkLists(
        split.view(-1, RECORD_FIELDS),
        merge.view(-1, RECORD_FIELDS),
        prefill.view(-1, RECORD_FIELDS),
        cum,
        capacity,
    )


def plan(spec: AttentionSpec, table: PageTable, qo_indptr: Tensor, work: WorkLists) -> None:
    """Launch the planner: fill `work` from `table` and `qo_indptr` ([batch + 1] int32)."""
    decode = decode_tile(spec)
    plan_kernel[(1,)](
        qo_indptr,
        table.lengths,
        table.indptr if table.indptr is not None else table.lengths,
        work.cum,
        work.split,
        work.merge,
        work.prefill,
        spec.batch_size,
        spec.total_q,
        table.width,
        split_programs(spec),
        work.capacity.split,
        work.capacity.merge,
        work.capacity.prefill,
        NUM_KV_HEADS=spec.num_kv_heads,
        GROUP=spec.group_size,
        PAGE_SIZE=spec.page_size,
        CAUSAL=spec.causal,
        IS_CSR=table.is_csr,
        FROM_LAST_PAGE_LEN=table.from_last_page_len,
        MAX_DECODE_Q=MAX_DECODE_Q_LEN,
        DECODE_BLOCK_M=decode.block_m,
        DECODE_BLOCK_N=decode.block_n,
        PREFILL_BLOCK_M=prefill_tile(spec).block_m,
        # Few values, so that a new batch size seldom compiles: 8 steps find one of 255 requests.
        SEARCH_STEPS=-(-spec.batch_size.bit_length() // 8) * 8,
        BLOCK=256 if work.capacity.split <= 256 else 1024,
        num_warps=8,
    )
