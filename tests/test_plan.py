"""The device planner: equal to its twin, and what the lists must be for any batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonattn.kernels import _config
from tritonattn.kernels import plan as plan_op
from tritonattn.layout import PageTable
from tritonattn.reference import plan as reference
from tritonattn.spec import AttentionSpec

PAGE = 4


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch with its heads and how many programs to fill."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_kv_heads: int
    group_size: int
    programs: int
    causal: bool
    csr: bool

    def table(self) -> PageTable:
        pages = [-(-length // PAGE) for length in self.kv_lens]
        lengths = torch.tensor(self.kv_lens, dtype=torch.int32)
        if self.csr:
            indptr = torch.tensor([3, *pages], dtype=torch.int32).cumsum(0).int()
            return PageTable.csr(
                indptr, torch.zeros(int(indptr[-1]), dtype=torch.int32), lengths, PAGE
            )
        width = max(pages, default=0) + 1
        return PageTable.dense(torch.zeros(len(pages), width, dtype=torch.int32), lengths, PAGE)

    def spec(self, table: PageTable) -> AttentionSpec:
        total_q = sum(self.q_lens) + 2
        return AttentionSpec(
            device=torch.device("cpu"),
            q_dtype=torch.float16,
            kv_dtype=torch.float16,
            num_qo_heads=self.num_kv_heads * self.group_size,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=128,
            head_dim_vo=128,
            page_size=PAGE,
            batch_size=len(self.q_lens),
            total_q=total_q,
            max_q_len=max(self.q_lens, default=0),
            max_kv_len=table.max_kv_len,
            is_csr=self.csr,
            causal=self.causal,
        )


def make_batches() -> st.SearchStrategy[Batch]:
    request = st.tuples(st.sampled_from([0, 1, 1, 2, 8, 9, 33]), st.integers(0, 900))
    return st.builds(
        lambda requests, **fields: Batch(*(zip(*requests, strict=True)), **fields),
        st.lists(request, min_size=1, max_size=7),
        num_kv_heads=st.sampled_from([1, 2, 8]),
        group_size=st.sampled_from([1, 4, 7, 48]),
        programs=st.sampled_from([1, 7, 64, 500]),
        causal=st.booleans(),
        csr=st.booleans(),
    )


def planned(
    batch: Batch, poison: int
) -> tuple[plan_op.WorkLists, tuple[list[Any], ...], AttentionSpec]:
    """Return the kernel's lists, made over poisoned memory, and the twin's."""
    table = batch.table()
    spec = batch.spec(table)
    qo_indptr = torch.tensor([0, *batch.q_lens], dtype=torch.int32).cumsum(0).int()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_op, "split_programs", lambda spec: batch.programs)
        workspace = torch.full((plan_op.workspace_bytes(spec),), poison, dtype=torch.uint8)
        work = plan_op.carve(spec, workspace)
        plan_op.plan(spec, table, qo_indptr, work)
    decode = _config.decode_tile(spec)
    expected = reference.plan(
        table,
        qo_indptr,
        total_q=spec.total_q,
        num_kv_heads=batch.num_kv_heads,
        group_size=batch.group_size,
        causal=batch.causal,
        programs=batch.programs,
        max_decode_q_len=_config.MAX_DECODE_Q_LEN,
        decode_block_m=decode.block_m,
        decode_block_n=decode.block_n,
        prefill_block_m=_config.prefill_tile(spec).block_m,
    )
    return work, expected, spec


def check_equal(batch: Batch, poison: int = 0xFF) -> None:
    work, expected, _ = planned(batch, poison)
    lists = (work.split, work.merge, work.prefill)
    for name, found, records in zip(("split", "merge", "prefill"), lists, expected, strict=True):
        assert len(records) <= found.size(0), f"{name} list overflows its capacity"
        live = torch.tensor(records, dtype=torch.int32).view(-1, plan_op.RECORD_FIELDS)
        assert torch.equal(found[: len(records)], live), name
        assert (found[len(records) :, 1] == 0).all(), f"{name}: surplus entries must have q_len 0"
    slots = [record[7] for record in expected[0] if record[7] >= 0]
    assert slots == list(range(len(slots)))
    assert len(slots) <= work.capacity.slots


@settings(max_examples=40, deadline=None, derandomize=True)
@given(make_batches())
def test_equals_its_twin_on_any_batch(batch: Batch) -> None:
    check_equal(batch)


@pytest.mark.parametrize("csr", [False, True])
def test_many_requests_beside_a_long_one(csr: bool) -> None:
    """More requests than one pass holds."""
    lengths = (5000, *(i % 70 for i in range(1, 1500)))
    check_equal(Batch((1,) * 1500, lengths, 2, 4, 64, True, csr))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(make_batches())
def test_each_key_of_each_row_is_attended_once(batch: Batch) -> None:
    """A property of the schedule itself, on the twin: no key left out, none twice."""
    table = batch.table()
    spec = batch.spec(table)
    tile = _config.decode_tile(spec)
    qo_indptr = torch.tensor([0, *batch.q_lens], dtype=torch.int32).cumsum(0).int()
    split, merge, prefill = reference.plan(
        table,
        qo_indptr,
        total_q=spec.total_q,
        num_kv_heads=batch.num_kv_heads,
        group_size=batch.group_size,
        causal=batch.causal,
        programs=batch.programs,
        max_decode_q_len=_config.MAX_DECODE_Q_LEN,
        decode_block_m=tile.block_m,
        decode_block_n=tile.block_n,
        prefill_block_m=64,
    )
    for request, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        short = q_len <= _config.MAX_DECODE_Q_LEN
        mine = [record for record in (split if short else prefill) if record[6] == request]
        block_m = tile.block_m if short else 64
        tiles = sorted({record[2] for record in mine})
        assert tiles == list(range(-(-q_len * batch.group_size // block_m)))
        for q_tile in tiles:
            chunks = sorted((r[3], r[4], r[7]) for r in mine if r[2] == q_tile)
            if not short:
                last = (min((q_tile + 1) * 64, q_len * batch.group_size) - 1) // batch.group_size
                kv_end = max(kv_len - q_len + last + 1, 0) if batch.causal else kv_len
                assert [chunk[:2] for chunk in chunks] == [(0, kv_end)]
                continue
            position = 0
            for start, end, _ in chunks:
                assert start == position or start >= kv_len == position
                assert start % tile.block_n == 0
                position = max(position, end)
            assert position == kv_len
            merged = [r for r in merge if r[0] == int(qo_indptr[request]) and r[2] == q_tile]
            slots = [slot for _, _, slot in chunks]
            if len(chunks) == 1:
                assert slots == [-1]
            else:
                assert [(r[3], r[4]) for r in merged if r[1]] == [(slots[0], len(slots))]


def test_a_smaller_plan_leaves_nothing_of_a_larger_one() -> None:
    """FI 4002: lists made over those of a larger batch hold no stale item."""
    large = Batch((1,) * 6, (800,) * 6, 2, 4, 64, True, False)
    small = dataclasses.replace(large, q_lens=(0, 0, 1, 0, 0, 0), kv_lens=(0, 0, 7, 0, 0, 0))
    for batch in (large, small):
        table = large.table()
        table.lengths.copy_(torch.tensor(batch.kv_lens))
        spec = large.spec(table)
        if batch is large:
            workspace = torch.full((plan_op.workspace_bytes(spec),), 0xFF, dtype=torch.uint8)
        work = plan_op.carve(spec, workspace)
        qo_indptr = torch.tensor([0, *batch.q_lens], dtype=torch.int32).cumsum(0).int()
        plan_op.plan(spec, table, qo_indptr, work)
    assert int((work.split[:, 1] > 0).sum()) == 1
    assert work.merge.numel() == 0 or (work.merge[:, 1] == 0).all()


def test_capacity_depends_on_shapes_only() -> None:
    batch = Batch((1, 1), (10, 10), 2, 4, 64, True, False)
    spec = batch.spec(batch.table())
    longer = dataclasses.replace(spec, max_kv_len=10**6)
    assert plan_op.WorkCapacity.of(spec) == plan_op.WorkCapacity.of(longer)
    assert plan_op.WorkCapacity.of(dataclasses.replace(spec, max_q_len=1)).prefill == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=make_batches(),
    max_q_len=st.integers(0, 9),
    garbage=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=8, max_size=8),
    is_garbage=st.booleans(),
)
def test_contradictory_metadata_writes_within_the_workspace(
    batch: Batch, max_q_len: int, garbage: list[int], is_garbage: bool
) -> None:
    """A bound that is too small, an indptr of any values: slots and lists stay in bounds."""
    table = batch.table()
    spec = dataclasses.replace(batch.spec(table), max_q_len=max_q_len)
    qo_indptr = torch.tensor([0, *batch.q_lens], dtype=torch.int32).cumsum(0).int()
    if is_garbage:
        qo_indptr = torch.tensor(garbage[: qo_indptr.numel()], dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_op, "split_programs", lambda spec: batch.programs)
        size = plan_op.workspace_bytes(spec)
        guarded = torch.full((size + 4096,), 0x5A, dtype=torch.uint8)
        work = plan_op.carve(spec, guarded[:size])
        plan_op.plan(spec, table, qo_indptr, work)
    assert (guarded[size:] == 0x5A).all()
    live = work.split[work.split[:, 1] > 0]
    assert (live[:, 7] < work.capacity.slots).all()
    merges = work.merge[work.merge[:, 1] > 0]
    assert (merges[:, 3] + merges[:, 4] <= work.capacity.slots).all()
    assert (live[:, 0] + live[:, 1] <= spec.total_q).all()


def test_lengths_from_last_page_len() -> None:
    """A request without pages has length 0 whatever last_page_len says."""
    indptr = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    last = torch.tensor([3, 1, 4], dtype=torch.int32)
    table = PageTable.csr(
        indptr, torch.zeros(6, dtype=torch.int32), last, PAGE, from_last_page_len=True
    )
    assert table.kv_lens().tolist() == [0, 9, 4]
    batch = Batch((1, 1, 1), (0, 0, 0), 2, 4, 64, True, True)
    spec = batch.spec(table)
    work = plan_op.carve(spec, torch.empty(plan_op.workspace_bytes(spec), dtype=torch.uint8))
    plan_op.plan(spec, table, torch.arange(4, dtype=torch.int32), work)
    assert work.split[:3, 5].tolist() == [0, 9, 4]
