"""Cases as data: lengths, names, suites, and a user's own file."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonattn.perf.cases import (
    BLOCK_OPS,
    DTYPES,
    MAX_DRAWN_KV_LEN,
    MODELS,
    BlockCase,
    Case,
    StepCase,
    expand_lengths,
    heads_of,
)
from tritonattn.perf.providers import kind_of
from tritonattn.perf.roofs import Roofs
from tritonattn.perf.steps import BlockStep, Step
from tritonattn.perf.suites import SUITES, peers, tiny

CPU = torch.device("cpu")


def table_of_peers() -> list[tuple[Any, ...]]:
    """Return (op, Hq, Hkv, D, q lengths, kv lengths) of the published table, row by row."""

    def rows(op: str, heads: tuple[int, int], *batches: tuple[int, int, int]) -> list[Any]:
        return [(op, *heads, 128, (q,) * batch, (kv,) * batch) for batch, q, kv in batches]

    uneven = tuple(1 + 977 * i % 16000 for i in range(64))
    return [
        *rows("decode", (32, 8), (1, 1, 1024), (1, 1, 8192), (1, 1, 131072), (8, 1, 4096)),
        *rows("decode", (32, 8), (16, 1, 32768), (64, 1, 1024), (64, 1, 8192), (256, 1, 2048)),
        *rows("decode", (8, 1), (1, 1, 131072), (8, 1, 4096), (16, 1, 32768), (64, 1, 8192)),
        *rows("decode", (8, 1), (256, 1, 2048)),
        *rows("decode", (28, 4), (8, 1, 4096), (64, 1, 1024), (64, 1, 8192)),
        *rows("decode", (32, 32), (1, 1, 1024), (8, 1, 4096), (64, 1, 8192)),
        ("decode", 32, 8, 128, (1,) * 64, uneven),
        ("decode", 32, 8, 128, (1,) * 64, (131072, *(1024,) * 63)),
        *rows("prefill", (32, 8), (16, 512, 512), (8, 2048, 2048), (2, 8192, 8192)),
        *rows("prefill", (32, 8), (1, 16384, 16384), (2, 2048, 16384), (8, 512, 8192)),
        *rows("prefill", (32, 8), (16, 128, 4096)),
        *rows("prefill", (8, 1), (16, 512, 512), (2, 8192, 8192)),
        *rows("prefill", (28, 4), (2, 8192, 8192)),
        *rows("prefill", (32, 32), (2, 8192, 8192)),
        ("mixed", 32, 8, 128, (1,) * 60 + (2048,) * 2, (4096,) * 62),
        *rows("speculative", (32, 8), (64, 5, 4096)),
    ]


def test_peers_are_the_published_table() -> None:
    table = table_of_peers()
    assert [row[0] for row in table].count("decode") == 21
    assert [row[0] for row in table].count("prefill") == 11
    cases = peers()
    assert [(c.op, *heads_of(c.model), *c.tokens()) for c in cases if isinstance(c, StepCase)] == (
        table
    )
    for case in cases:
        assert (case.page_size, case.kv_layout, case.dtype) == (16, "NHD", "bf16")
        assert isinstance(case, StepCase)
        assert case.causal
        assert case.features == ""
        assert kind_of(case) == case.op


@pytest.mark.parametrize(
    ("text", "q_lens", "kv_lens"),
    [
        ("3x1x1024", (1, 1, 1), (1024, 1024, 1024)),
        ("2x1x40+1x8x12", (1, 1, 8), (40, 40, 12)),
        ("4x1xcycle(1,7,16)", (1, 1, 1, 1), (1, 8, 15, 6)),
        ("3x2xcycle(0,1,100)", (2, 2, 2), (2, 2, 2)),
        ("3x1xuniform(7,7,0)", (1, 1, 1), (7, 7, 7)),
        ("2x1xlognormal(100,0,0)", (1, 1), (100, 100)),
        ("1x1xlognormal(1e9,0,0)", (1,), (MAX_DRAWN_KV_LEN,)),
        ("2x1xlognormal(0.001,0,3)", (1, 1), (1, 1)),
    ],
)
def test_lengths(text: str, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> None:
    assert expand_lengths(text) == (q_lens, kv_lens)


def test_drawn_lengths_are_the_same_everywhere() -> None:
    # Figures of sweeps are only comparable while these stay.
    assert expand_lengths("5x1xuniform(1,100,0)")[1] == (21, 72, 51, 84, 33)
    assert expand_lengths("5x1xlognormal(2048,1,0)")[1] == (1045, 604, 1610, 1535, 852)


def test_drawn_lengths_follow_their_distribution() -> None:
    drawn = expand_lengths("2000x1xuniform(10,20,1)")[1]
    assert set(drawn) == set(range(10, 21))
    other = expand_lengths("2000x1xuniform(10,20,2)")[1]
    assert drawn != other
    long = sorted(expand_lengths("2000x1xlognormal(2048,1,0)")[1])
    assert long[1000] == pytest.approx(2048, rel=0.1)
    assert long[1682] / long[1000] == pytest.approx(2.718, rel=0.15)  # one sigma
    assert long[-1] <= MAX_DRAWN_KV_LEN


@settings(deadline=None)
@given(
    count=st.integers(1, 40),
    q_len=st.integers(1, 300),
    low=st.integers(0, 200),
    span=st.integers(0, 200),
    seed=st.integers(0, 9),
)
def test_keys_are_never_fewer_than_queries(
    count: int, q_len: int, low: int, span: int, seed: int
) -> None:
    q_lens, kv_lens = expand_lengths(f"{count}x{q_len}xuniform({low},{low + span},{seed})")
    assert len(q_lens) == len(kv_lens) == count
    for length in kv_lens:
        assert length == q_len or max(low, q_len) <= length <= low + span


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be groups"),
        ("1024", "must be groups"),
        ("1x1x8+", "must be groups"),
        ("1x1x8,1x1x9", "must be groups"),
        ("-1x1x8", "must be groups"),
        ("1x1x-8", "must be groups"),
        ("1x1x8 + 1x1x8", "must be groups"),
        ("1x1xuniform(1, 2, 3)", "must be groups"),
        ("1x1xuniform(1,2)", "kv tokens must be a number"),
        ("1x1xnormal(1,2,3)", "kv tokens must be a number"),
        ("1x1xmany", "kv tokens must be a number"),
        ("1x1xuniform(a,2,3)", "could not convert"),
        ("1x1xuniform(9,2,3)", "empty range"),
        ("0x1x8", "at least one query token"),
        ("3x0x8", "at least one query token"),
    ],
)
def test_lengths_that_are_none(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        StepCase("decode", "tiny", text)


step_cases = st.builds(
    StepCase,
    op=st.sampled_from(["decode", "host"]),
    model=st.sampled_from(["tiny", "mha-32", "4/2/16", "4/2/160", "4/1/16"]),
    lengths=st.sampled_from(["1x1x8", "11x1x8", "1x1x8+1x1x8", "2x1xuniform(1,8,0)"]),
    page_size=st.sampled_from([1, 16, 161]),
    kv_layout=st.sampled_from(["NHD", "HND"]),
    dtype=st.sampled_from(list(DTYPES)),
    causal=st.booleans(),
    window_left=st.integers(-1, 2),
    logits_soft_cap=st.sampled_from([0.0, 1.0, 30.0, 30.000001, 1e-7]) | st.floats(0, 100),
)
block_cases = st.builds(
    BlockCase,
    what=st.sampled_from(BLOCK_OPS),
    model=st.sampled_from(["tiny", "4/2/16"]),
    num_layers=st.sampled_from([1, 11]),
    moved=st.sampled_from([1, 11]),
    pool=st.sampled_from([22, 122]),
    page_size=st.sampled_from([1, 16]),
    kv_layout=st.sampled_from(["NHD", "HND"]),
    dtype=st.sampled_from(list(DTYPES)),
)


@settings(max_examples=300, deadline=None)
@given(st.tuples(step_cases, step_cases) | st.tuples(block_cases, step_cases | block_cases))
def test_names_tell_cases_apart(pair: tuple[Case, Case]) -> None:
    first, second = pair
    assert (first.name == second.name) == (first == second)


@settings(max_examples=200, deadline=None)
@given(case=step_cases, data=st.data())
def test_each_parameter_is_in_the_name(case: StepCase, data: st.DataObject) -> None:
    field = data.draw(st.sampled_from([field.name for field in dataclasses.fields(case)]))
    other = data.draw(step_cases)
    changed = dataclasses.replace(case, **{field: getattr(other, field)})
    assert (changed.name == case.name) == (changed == case)


def test_a_name_as_it_is_read() -> None:
    case = StepCase("decode", "mha-32", "8x1x64", 1, "HND", "fp16", False, 127, 30.0)
    assert case.name == "decode-mha-32-8x1x64-p1-HND-fp16-full-w127-cap30.0"
    assert case.features == "w127-cap30.0"
    plain = StepCase("prefill", "40/8/128", "1x16x16")
    assert plain.name == "prefill-40/8/128-1x16x16-p16-NHD-bf16"


def test_names_of_all_suites() -> None:
    every = [case for name in SUITES for case in SUITES[name]()]
    for name in SUITES:
        names = [case.name for case in SUITES[name]()]
        assert names
        assert len(names) == len(set(names)), name
    # Suites may share cases; the same name is then the same case.
    by_name = {case.name: case for case in every}
    assert all(by_name[case.name] == case for case in every)
    assert not any(character in name for name in by_name for character in '"\n\t')


def test_suites_are_those_promised() -> None:
    others = {"blockops", "host", "latency", "peers"}
    assert set(SUITES) == {"decode", "prefill", "mixed", "speculative"} | others
    for op in ("decode", "prefill", "mixed", "speculative"):
        assert {kind_of(case) for case in SUITES[op]()} == {op}
        assert {case.op for case in SUITES[op]()} == {op}
    assert {case.op for case in SUITES["host"]()} == {"host"}
    assert {case.op for case in SUITES["blockops"]()} == {"block_copy"}
    latency = [case for case in SUITES["latency"]() if isinstance(case, StepCase)]
    assert {len(case.tokens()[0]) for case in latency} == {1}
    models = {case.model for name in SUITES for case in SUITES[name]()}
    assert models == set(MODELS) - {"tiny"}
    shapes = {heads_of(model) for model in models}
    assert {(32, 8, 128), (8, 1, 128), (28, 4, 128), (40, 8, 128)} <= shapes
    assert {dim for _, _, dim in shapes} == {64, 128, 256}


@pytest.mark.parametrize("name", list(SUITES))
def test_tiny_suites_are_small(name: str) -> None:
    cases = tiny(name)
    assert cases
    assert {case.model for case in cases} == {"tiny"}
    for case in cases:
        if isinstance(case, StepCase):
            assert sum(case.tokens()[1]) < 100
    ops = {case.op for case in SUITES[name]()} if name != "latency" else {"decode"}
    assert {case.op for case in cases} == ops


@pytest.mark.parametrize(
    ("case", "pairs", "tokens"),
    [
        # pairs of query and key that count; tokens of K (as many of V) and of q (as many of out)
        (StepCase("decode", "tiny", "2x1x24"), 48, (48, 2)),
        (StepCase("prefill", "tiny", "1x4x4"), 10, (4, 4)),
        (StepCase("prefill", "tiny", "1x4x4", causal=False), 16, (4, 4)),
        (StepCase("prefill", "tiny", "1x3x10"), 8 + 9 + 10, (10, 3)),
        (StepCase("mixed", "tiny", "2x1x20+1x2x5"), 20 + 20 + 4 + 5, (45, 4)),
        (StepCase("decode", "tiny", "2x1x24", dtype="fp32", kv_layout="HND"), 48, (48, 2)),
    ],
)
def test_work_of_a_step(case: StepCase, pairs: int, tokens: tuple[int, int]) -> None:
    step = Step(case, CPU, cold=False)
    assert step.flops == 4 * 4 * 16 * pairs
    size = 4 if case.dtype == "fp32" else 2
    assert step.bytes == size * 16 * (2 * 2 * tokens[0] + 2 * 4 * tokens[1])
    assert step.columns() == {
        "batch_size": len(case.tokens()[0]),
        "total_q": sum(case.tokens()[0]),
        "total_kv": tokens[0],
        "max_q_len": max(case.tokens()[0]),
        "max_kv_len": max(case.tokens()[1]),
    }


def test_the_issue_s_flops_of_prefill() -> None:
    # 4 * Hq * D * (q * kv - q * (q - 1) / 2) a request
    step = Step(StepCase("prefill", "8/1/16", "2x128x512"), CPU, cold=False)
    assert step.flops == 2 * 4 * 8 * 16 * (128 * 512 - 128 * 127 / 2)


@pytest.mark.parametrize(
    ("what", "times"),
    [("copy_blocks", 2), ("swap_blocks", 2), ("swap_blocks to host", 1)],
)
def test_work_of_a_block_op(what: str, times: int) -> None:
    step = BlockStep(BlockCase(what, "tiny", 3, 4, 10, 8), CPU)
    page = 2 * 8 * 2 * 16 * 2  # K and V, tokens, heads, head_dim, bytes
    assert step.bytes == times * page * 4 * 3
    assert step.flops == 0


def test_roofs_of_a_step() -> None:
    step = Step(StepCase("decode", "tiny", "2x1x24"), CPU, cold=False)
    assert step.bytes == 6656
    assert step.flops == 12288
    # 6656 bytes at 2 GB/s take 3.3 us; 12288 operations at 1 TFLOPS take 0.01 us, and so on
    assert step.roof_s(Roofs(8.0, 2.0, 1.0)) == pytest.approx(3.328e-6)
    assert step.roof_s(Roofs(1.0, 1e6, 1e-3)) == pytest.approx(1.2288e-5)
    blocks = BlockStep(BlockCase("copy_blocks", "tiny", 1, 2, 4, 8), CPU)
    assert blocks.roof_s(Roofs(2.0, 1e9, 1e9)) == pytest.approx(blocks.bytes / 2e9)
    bus = BlockStep(BlockCase("swap_blocks to host", "tiny", 1, 2, 4, 8), CPU)
    assert math.isnan(bus.roof_s(Roofs(1.0, 1.0, 1.0)))  # there is no roof


@pytest.mark.parametrize("text", ["2x8x5", "1x0x8+1x1x0"])
def test_keys_include_the_queries(text: str) -> None:
    with pytest.raises(ValueError, match="kv tokens include the q tokens"):
        expand_lengths(text)
    # A distribution is cut off there.
    assert expand_lengths("2x8xcycle(1,3,9)")[1] == (8, 8)


def test_decode_has_single_tokens() -> None:
    with pytest.raises(ValueError, match="decode has one query token a request, got lengths '2x3x"):
        StepCase("decode", "tiny", "2x3x10")
    with pytest.raises(ValueError, match="at most 65536 requests, got 99999999999"):
        StepCase("decode", "tiny", "99999999999x1x10")
