"""Even shares of short queries: the schedule for any batch, and the kernel for any cut."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonattn
from tritonattn import env
from tritonattn.backends import get_backend
from tritonattn.cases import AttentionCase, AttentionInputs, make_inputs, reference_results
from tritonattn.checks import make_page_table
from tritonattn.kernels import stream, stream_plan
from tritonattn.kernels._config import decode_tile
from tritonattn.layout import PagedKVCache
from tritonattn.plan import AttentionPlan
from tritonattn.spec import AttentionSpec

pytestmark = pytest.mark.skipif(
    not env.INTERPRET, reason="kernels take CPU tensors in the interpreter only"
)


def workers_of(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    for module in (stream, stream_plan):
        monkeypatch.setattr(module, "stream_workers", lambda spec: number)


def described(inputs: AttentionInputs) -> tuple[AttentionSpec, Any, PagedKVCache]:
    cache = PagedKVCache.of(inputs.kv_cache, inputs.kv_layout)
    tables = {"block_table": None, "indptr": None, "indices": None, **inputs.table}
    table = make_page_table(inputs.seq_lens, page_size=cache.page_size, **tables)
    plan = AttentionPlan(
        inputs.qo_indptr, table, causal=inputs.causal, max_q_len=None, max_kv_len=None
    )
    return plan.spec(inputs.q, cache, ()), table, cache


def planned(inputs: AttentionInputs) -> tuple[AttentionSpec, Any, PagedKVCache, stream_plan.Shares]:
    """Plan into memory that holds garbage."""
    spec, table, cache = described(inputs)
    memory = torch.full((stream_plan.workspace_bytes(spec),), 251, dtype=torch.uint8)
    shares = stream_plan.carve(spec, memory)
    stream_plan.plan(spec, table, inputs.qo_indptr, shares)
    return spec, table, cache, shares


def wide(words: torch.Tensor) -> list[int]:
    low, high = words[:, 0].long() & 0xFFFFFFFF, words[:, 1].long()
    return ((high << 32) | low).tolist()


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], int, int, int]:
    size = draw(st.integers(1, 12))
    q_lens = draw(st.lists(st.sampled_from([0, 1, 1, 1, 5, 8, 9]), min_size=size, max_size=size))
    lengths = st.sampled_from([0, 1, 63, 64, 65, 200, 640])
    kv_lens = draw(st.lists(lengths, min_size=size, max_size=size))
    heads = draw(st.sampled_from([(1, 1), (2, 4), (2, 16)]))
    return q_lens, kv_lens, *heads, draw(st.integers(1, 40))


@settings(max_examples=25, deadline=None)
@given(batches())
def test_every_tile_has_one_worker_and_shares_are_even(
    batch: tuple[list[int], list[int], int, int, int],
) -> None:
    q_lens, kv_lens, num_kv_heads, group, workers = batch
    with pytest.MonkeyPatch.context() as monkeypatch:
        workers_of(monkeypatch, workers)
        inputs = make_inputs(
            AttentionCase(tuple(q_lens), tuple(kv_lens), num_kv_heads * group, num_kv_heads, 16,
                          page_size=64)
        )  # fmt: skip
        spec, _, _, shares = planned(inputs)
    tile = decode_tile(spec)
    base, rem, live = shares.header[:3].tolist()
    # What there is to do, in the order of units: (request, pair, tile).
    work: list[tuple[int, int, int] | None] = []
    firsts = []
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if not 0 < q_len <= 8:
            continue
        firsts.append((request, len(work)))
        tiles = max(1, -(-kv_len // tile.block_n))
        size = -(-tiles // base) * base if rem < 0 else tiles
        for pair in range(-(-q_len * group // tile.block_m) * num_kv_heads):
            work += [(request, pair, at) for at in range(tiles)]
            work += [None] * (size - tiles)
    assert live == len(firsts)
    records = shares.requests[:live]
    assert records[:, 3].tolist() == [request for request, _ in firsts]
    assert wide(records[:, 4:6]) == [first for _, first in firsts]
    assert records[:, 1].tolist() == [q_lens[request] for request, _ in firsts]
    begins, ends = wide(shares.workers[:, 0:2]), wide(shares.workers[:, 2:4])
    covered = [unit for begin, end in zip(begins, ends, strict=True) for unit in range(begin, end)]
    assert covered == list(range(len(work)))
    for begin, end, place in zip(begins, ends, shares.workers[:, 4].tolist(), strict=True):
        if begin < end:
            request, first = firsts[place]
            owner = next(unit for unit in work[begin::-1] if unit is not None)
            assert owner[0] == request
            assert first <= begin
    done = [sum(unit is not None for unit in work[b:e]) for b, e in zip(begins, ends, strict=True)]
    even = -(-sum(done) // workers)
    assert max(done) <= even + max(2, even // 12)
    if rem > 0:
        assert max(done) - min(done) <= 1
    assert not shares.counters.any()


CASES = [
    AttentionCase((1, 1, 0, 1), (200, 17, 5, 0), 4, 2, 16, page_size=4),
    AttentionCase((1, 5, 8, 3), (330, 37, 70, 3), 6, 2, 24, page_size=8, kv_layout="HND",
                  table="csr"),
    AttentionCase((8, 1), (130, 250), 16, 2, 32, page_size=16),
    AttentionCase((1, 2), (500, 90), 5, 1, 80, page_size=48, causal=False),
    AttentionCase((1, 1), (129, 64), 3, 3, 16, page_size=1, dtype=torch.float32),
]  # fmt: skip


def run(inputs: AttentionInputs, layers: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Run layers of one plan with poisoned scratch into sentinel-filled outputs."""
    spec, table, cache, shares = planned(inputs)
    memory = torch.full((stream.workspace_bytes(spec),), 255, dtype=torch.uint8)
    out = torch.full_like(inputs.q, 7.0)
    lse = torch.full(inputs.q.shape[:2], 7.0)
    for _ in range(layers):
        stream.stream(
            spec, inputs.q, cache, table, shares, stream.carve(spec, memory), out, lse,
            sm_scale_log2=spec.head_dim_qk**-0.5 * math.log2(math.e), lse_scale=1.0,
        )  # fmt: skip
        assert not shares.counters.any(), "the next layer would count on"
    return out, lse


@pytest.mark.parametrize("workers", [1, 3, 7, 20])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_cut_gives_the_same(
    case: AttentionCase, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers_of(monkeypatch, workers)
    inputs = make_inputs(case)
    out, lse = run(inputs, layers=2)
    rows = int(inputs.qo_indptr[-1])
    expected, expected_lse = reference_results(inputs)
    torch.testing.assert_close(out[:rows].float(), expected[:rows].float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse[:rows], expected_lse[:rows].float(), rtol=1e-3, atol=1e-3)
    assert (out[rows:] == 7.0).all()
    assert (lse[rows:] == 7.0).all()
    again, lse_again = run(inputs)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


def test_groups_of_groups_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request over more workers than a merge takes: a tree of two levels."""
    workers_of(monkeypatch, 39)
    inputs = make_inputs(AttentionCase((1,), (2500,), 8, 1, 16, page_size=16))
    out, _ = run(inputs)
    expected = reference_results(inputs)[0]
    torch.testing.assert_close(out[:1].float(), expected[:1].float(), rtol=2e-2, atol=2e-2)


def test_a_plan_cleans_the_counters_of_a_launch_that_was_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers_of(monkeypatch, 7)
    inputs = make_inputs(CASES[0])
    spec, table, _, shares = planned(inputs)
    shares.counters.fill_(3)
    stream_plan.plan(spec, table, inputs.qo_indptr, shares)
    assert not shares.counters.any()


@pytest.mark.parametrize("q_lens", [(1, 1, 0), (17, 1, 40)], ids=["decode", "mixed"])
def test_as_a_backend(q_lens: tuple[int, ...]) -> None:
    """By name, mixed batches too, in a stage's memory and without."""
    inputs = make_inputs(AttentionCase(q_lens, (100, 200, 90), 4, 2, 16, page_size=8))
    rows = int(inputs.qo_indptr[-1])
    expected = reference_results(inputs)[0][:rows].float()
    stage = tritonattn.PipelineBuffers.allocate(
        num_stages=1, max_batch_size=4, max_num_tokens=inputs.q.size(0), max_pages_per_request=32,
        num_qo_heads=4, num_kv_heads=2, head_dim=16, page_size=8, dtype=inputs.q.dtype,
        device="cpu",
    ).stage(0)  # fmt: skip
    for options in ({}, {"buffers": stage}):
        out = tritonattn.paged_attention(**inputs.arguments(), backend="triton:stream", **options)
        torch.testing.assert_close(out[:rows].float(), expected, rtol=2e-2, atol=2e-2)
    backend = get_backend("triton:stream")
    spec, _, _ = described(inputs)
    smaller = replace(spec, batch_size=1, total_q=1, max_q_len=1)
    assert all(
        a <= b
        for a, b in zip(
            backend.workspace_bytes(smaller), backend.workspace_bytes(spec), strict=True
        )
    )
