"""Even shares of a step's short queries for a fixed number of workers, made on the device.

    layout   qo_indptr [batch + 1], lengths [batch], indptr [batch + 1] -> requests, workers, header
    grid     one program
    method   KV tiles of each (request, query tile, KV head) pair -> units in a row -> units of a
             worker -> binary search for the request that it starts in

The pairs of a request follow each other, and the requests that have work do. A unit is a KV tile of
a pair; worker i owns the units from `start(i)` to `start(i + 1)`, which `header` describes:

    rem = -1   `base` each, and every pair is padded to a multiple of `base`: no worker has two
               pairs. Taken where that costs little.
    rem = 0    `base` each, a multiple of a pair, where all pairs are equally long: none is cut.
    else       `base` each, one more for the first `rem`: even to one tile, whatever the lengths.

    requests   q_start, q_len, kv_len, request, first unit (2 words), -, -    of those with work
    workers    first unit, last unit + 1 (2 words each), index in requests, -, -, -
    header     base, rem, number of requests with work, -

Chunks that are aligned and even shares: as in stream-K (Osama et al. 2023), for attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonattn.kernels._config import MAX_DECODE_Q_LEN, decode_tile, stream_workers
from tritonattn.kernels.plan import _find, _lengths
from tritonattn.layout import PageTable
from tritonattn.spec import AttentionSpec

FIELDS: tl.constexpr = tl.constexpr(8)  # int32 words of a record
RECORD_FIELDS = 8
HEADER_FIELDS = 4
# Merges of partial states by fan-ins of 16: three levels join 4096.
LEVELS = 3
_CANDIDATES = 16


@triton.jit
def worker_start(worker, base, rem):
    """Return a worker's first unit."""
    return worker.to(tl.int64) * base + tl.minimum(worker, tl.maximum(rem, 0))


@triton.jit
def worker_of(unit, base, rem):
    """Return which worker has a unit."""
    extra = tl.maximum(rem, 0)
    longer = extra.to(tl.int64) * (base + 1)
    return tl.where(
        unit < longer, unit // (base + 1), extra + (unit - longer) // tl.maximum(base, 1)
    ).to(tl.int32)


@triton.jit
def padded(tiles, base, rem):
    """Return the units of a pair."""
    chunk = tl.where(rem < 0, base, 1)
    return tl.cdiv(tiles, chunk) * chunk


@triton.jit
def _work(
    qo_indptr_ptr, lengths_ptr, indptr_ptr, request, mask, total_q, table_width,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, IS_CSR: tl.constexpr,
    FROM_LAST_PAGE_LEN: tl.constexpr, MAX_DECODE_Q: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return q_start, q_len, kv_len, pairs (0 for what takes the other path), tiles of a pair."""
    q_start, q_len, kv_len = _lengths(
        qo_indptr_ptr, lengths_ptr, indptr_ptr, request, mask, total_q, table_width, PAGE_SIZE,
        IS_CSR, FROM_LAST_PAGE_LEN,
    )  # fmt: skip
    short = mask & (q_len <= MAX_DECODE_Q)
    pairs = tl.where(short, tl.cdiv(q_len * GROUP, BLOCK_M) * NUM_KV_HEADS, 0)
    # Rows without keys have a tile too, in which all is masked.
    return q_start, q_len, kv_len, pairs, tl.maximum(tl.cdiv(kv_len, BLOCK_N), 1)


@triton.jit
def _store_wide(ptr, value, mask):
    tl.store(ptr, value.to(tl.int32), mask=mask)
    tl.store(ptr + 1, (value >> 32).to(tl.int32), mask=mask)


def _metadata(grid, kernel, args):
    return {"name": f"stream_plan_kernel_b{args['batch_size']}"}


@triton.jit(
    launch_metadata=_metadata,
    do_not_specialize=["batch_size", "total_q", "table_width", "num_workers", "num_counters"],
)
def stream_plan_kernel(
    qo_indptr_ptr,
    lengths_ptr,
    indptr_ptr,
    header_ptr,
    requests_ptr,
    workers_ptr,
    counters_ptr,
    cum_ptr,
    batch_size,
    total_q,
    table_width,
    num_workers,
    num_counters,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_CSR: tl.constexpr,
    FROM_LAST_PAGE_LEN: tl.constexpr,
    MAX_DECODE_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill what the module docstring names; `cum_ptr` is scratch, [batch_size] int64."""
    offs = tl.arange(0, BLOCK)
    # Zeroed at each step, so that a launch that was cut short harms no later one.
    for first in range(0, num_counters, BLOCK):
        tl.store(counters_ptr + first + offs, 0, mask=first + offs < num_counters)

    units = tl.zeros([BLOCK], tl.int64)
    pairs_seen = tl.zeros([BLOCK], tl.int64)
    longest = tl.zeros([BLOCK], tl.int32)
    for first in range(0, batch_size, BLOCK):
        request = first + offs
        _, _, _, pairs, tiles = _work(
            qo_indptr_ptr, lengths_ptr, indptr_ptr, request, request < batch_size, total_q,
            table_width, NUM_KV_HEADS, GROUP, PAGE_SIZE, IS_CSR, FROM_LAST_PAGE_LEN, MAX_DECODE_Q,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        units += pairs.to(tl.int64) * tiles
        pairs_seen += pairs
        longest = tl.maximum(longest, tl.where(pairs > 0, tiles, 0))
    total = tl.sum(units, 0)
    num_pairs = tl.sum(pairs_seen, 0)
    most = tl.max(longest, 0)
    used = tl.maximum(tl.minimum(num_workers.to(tl.int64), total), 1)
    even = tl.maximum((total + used - 1) // used, 1)
    # A share may grow by so much for the sake of whole chunks.
    limit = even + tl.maximum(2, even // 12)
    base = total // used
    rem = (total - base * used).to(tl.int32)
    whole = tl.cdiv(even, tl.maximum(most, 1).to(tl.int64)) * most
    if (whole <= limit) & (num_pairs * most == total):
        base = whole
        rem = 0
    if num_pairs <= num_workers:
        # So few pairs have few tiles for each worker: 32 bits hold them.
        first_size = tl.minimum(even, 1 << 30).to(tl.int32)
        candidate = first_size + tl.arange(0, CANDIDATES) * tl.maximum(1, first_size // 128)
        chunks = tl.zeros([CANDIDATES], tl.int32)
        for first in range(0, batch_size, BLOCK):
            request = first + offs
            _, _, _, pairs, tiles = _work(
                qo_indptr_ptr, lengths_ptr, indptr_ptr, request, request < batch_size, total_q,
                table_width, NUM_KV_HEADS, GROUP, PAGE_SIZE, IS_CSR, FROM_LAST_PAGE_LEN,
                MAX_DECODE_Q, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            cut = (tiles[None, :] + candidate[:, None] - 1) // candidate[:, None]
            chunks += tl.sum(pairs[None, :] * cut, 1)
        fits = (chunks <= num_workers) & (candidate <= limit)
        best = tl.min(tl.where(fits, candidate, 0x7FFFFFFF), 0)
        if best < 0x7FFFFFFF:
            base = best.to(tl.int64)
            rem = -1

    done = tl.full([], 0, tl.int64)
    num_live = 0
    for first in range(0, batch_size, BLOCK):
        request = first + offs
        q_start, q_len, kv_len, pairs, tiles = _work(
            qo_indptr_ptr, lengths_ptr, indptr_ptr, request, request < batch_size, total_q,
            table_width, NUM_KV_HEADS, GROUP, PAGE_SIZE, IS_CSR, FROM_LAST_PAGE_LEN, MAX_DECODE_Q,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        live = pairs > 0
        size = pairs.to(tl.int64) * padded(tiles.to(tl.int64), base, rem)
        begin = done + tl.cumsum(size, 0) - size
        place = num_live + tl.cumsum(live.to(tl.int32), 0) - 1
        tl.store(cum_ptr + place, begin, mask=live)
        record = requests_ptr + place * FIELDS
        tl.store(record, q_start, mask=live)
        tl.store(record + 1, q_len, mask=live)
        tl.store(record + 2, kv_len, mask=live)
        tl.store(record + 3, request, mask=live)
        _store_wide(record + 4, begin, live)
        done += tl.sum(size, 0)
        num_live += tl.sum(live.to(tl.int32), 0)
    tl.store(header_ptr, base.to(tl.int32))
    tl.store(header_ptr + 1, rem)
    tl.store(header_ptr + 2, num_live)
    # The first units were written by other threads of this program.
    tl.debug_barrier()

    for first in range(0, num_workers, BLOCK):
        worker = first + offs
        mask = worker < num_workers
        begin = tl.minimum(worker_start(worker, base, rem), done)
        end = tl.minimum(worker_start(worker + 1, base, rem), done)
        record = workers_ptr + worker * FIELDS
        _store_wide(record, begin, mask)
        _store_wide(record + 2, end, mask)
        place = _find(cum_ptr, begin, num_live, SEARCH_STEPS)
        tl.store(record + 4, place.to(tl.int32), mask=mask)


@dataclass(frozen=True, slots=True)
class Shares:
    """The even shares of a step, on the device."""

    header: Tensor  # [4] int32
    requests: Tensor  # [batch, 8] int32
    workers: Tensor  # [workers, 8] int32
    counters: Tensor  # [LEVELS, 2 * workers] int32, 0 between launches
    cum: Tensor  # [batch] int64, scratch of the planner


def _sizes(spec: AttentionSpec) -> list[int]:
    """Return the parts of the workspace in int32 words, those of 8 bytes first."""
    workers = stream_workers(spec)
    records = RECORD_FIELDS * spec.batch_size, RECORD_FIELDS * workers
    return [2 * spec.batch_size, HEADER_FIELDS, *records, LEVELS * 2 * workers]


def workspace_bytes(spec: AttentionSpec) -> int:
    """Return the size of the shares of a spec, in bytes."""
    return 4 * sum(_sizes(spec))


def carve(spec: AttentionSpec, workspace: Tensor) -> Shares:
    """Lay the shares out in `workspace_bytes(spec)` bytes of uint8, whatever they hold."""
    cum, header, requests, workers, counters = workspace.view(torch.int32).split(_sizes(spec))
    return Shares(
        header,
        requests.view(-1, RECORD_FIELDS),
        workers.view(-1, RECORD_FIELDS),
        counters.view(LEVELS, -1),
        cum.view(torch.int64),
    )


def plan(spec: AttentionSpec, table: PageTable, qo_indptr: Tensor, shares: Shares) -> None:
    """Launch the planner: fill `shares` from `table` and `qo_indptr` ([batch + 1] int32)."""
    tile = decode_tile(spec)
    stream_plan_kernel[(1,)](
        qo_indptr,
        table.lengths,
        table.indptr if table.indptr is not None else table.lengths,
        shares.header,
        shares.requests,
        shares.workers,
        shares.counters,
        shares.cum,
        spec.batch_size,
        spec.total_q,
        table.width,
        shares.workers.size(0),
        shares.counters.numel(),
        NUM_KV_HEADS=spec.num_kv_heads,
        GROUP=spec.group_size,
        PAGE_SIZE=spec.page_size,
        IS_CSR=table.is_csr,
        FROM_LAST_PAGE_LEN=table.from_last_page_len,
        MAX_DECODE_Q=MAX_DECODE_Q_LEN,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        # Few values, so that a new batch size seldom compiles: 8 steps find one of 255 requests.
        SEARCH_STEPS=-(-spec.batch_size.bit_length() // 8) * 8,
        CANDIDATES=_CANDIDATES,
        BLOCK=256,
        num_warps=8,
    )
