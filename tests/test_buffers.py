"""Stage buffers: sizes, addresses, padding, capacity; the calls that use them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonattn
from tritonattn import PipelineBuffers, env
from tritonattn.backends import get_backend
from tritonattn.cases import AttentionCase, make_inputs, reference_results
from tritonattn.kernels import decode as decode_op
from tritonattn.kernels import plan as plan_op
from tritonattn.layout import PageTable
from tritonattn.reference import stage_metadata as twin
from tritonattn.stage import StageBuffers, StageCapacity

SIZES: dict[str, Any] = {
    "max_batch_size": 6,
    "max_num_tokens": 48,
    "max_pages_per_request": 6,
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "page_size": 8,
    "dtype": torch.bfloat16,
}
Metadata = dict[str, torch.Tensor]


def allocate(num_stages: int = 2, **changes: Any) -> PipelineBuffers:
    return PipelineBuffers.allocate(num_stages=num_stages, device="cpu", **SIZES | changes)


def case(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], **changes: Any) -> AttentionCase:
    return AttentionCase(q_lens, kv_lens, 4, 2, 16, page_size=8, **changes)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def metadata(inputs: Any) -> Metadata:
    """Return the tensors of a step, without causal."""
    return {k: v for k, v in inputs.metadata().items() if isinstance(v, torch.Tensor)}


def assert_right(inputs: Any, out: torch.Tensor) -> None:
    expected = reference_results(inputs)[0]
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_size_is_known_before_and_is_the_whole_allocation(num_stages: int) -> None:
    buffers = allocate(num_stages)
    size = PipelineBuffers.size_bytes(num_stages=num_stages, device="cpu", **SIZES)
    assert buffers.nbytes == size == num_stages * allocate(1).nbytes
    spans = []
    for index in range(num_stages):
        stage = buffers.stage(index)
        parts = [stage.workspace.step, stage.workspace.call, *stage.metadata().values()]
        spans += [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in parts if p.numel()]
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert spans[-1][1] - spans[0][0] <= size
    assert all(begin % 16 == 0 for begin, _ in spans)


def test_more_of_anything_takes_more() -> None:
    base = PipelineBuffers.size_bytes(num_stages=1, device="cpu", **SIZES)
    for name in ("max_batch_size", "max_num_tokens", "max_pages_per_request"):
        larger = SIZES | {name: 64 * SIZES[name]}
        assert PipelineBuffers.size_bytes(num_stages=1, device="cpu", **larger) > base


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 300), st.integers(1, 300), st.data(),
    st.sampled_from([(1, 1), (7, 1), (4, 2), (64, 2), (71, 1)]),
)  # fmt: skip
def test_a_stage_holds_whatever_is_within_its_capacity(
    batch: int, tokens: int, q_len: int, data: Any, heads: tuple[int, int]
) -> None:
    """The bound covers every smaller call, whatever tiles that chooses."""
    qo, kv = heads
    capacity = StageCapacity(**SIZES | {
        "max_batch_size": batch, "max_num_tokens": tokens, "num_qo_heads": qo, "num_kv_heads": kv,
    })  # fmt: skip
    spec = capacity.spec(torch.device("cpu"))
    smaller = dataclasses.replace(
        spec,
        batch_size=data.draw(st.integers(1, batch)),
        total_q=data.draw(st.integers(1, tokens)),
        max_q_len=min(q_len, tokens),
    )
    # As many programs as a large GPU has room for: the interpreter's one never splits a request.
    with mock.patch.object(plan_op, "split_programs", return_value=528):
        bound = get_backend("triton").workspace_bytes(spec)
        assert plan_op.workspace_bytes(smaller) <= bound.step
        assert decode_op.workspace_bytes(smaller) <= bound.call


@pytest.mark.parametrize("index", [-1, 2, 7])
def test_stage_index_out_of_range(index: int) -> None:
    with pytest.raises(IndexError, match=f"from 0 to 1, got {index}"):
        allocate(2).stage(index)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_stages": 0}, "num_stages must be at least 1, got 0"),
        ({"max_batch_size": 0}, "max_batch_size must be at least 1, got 0"),
        ({"max_num_tokens": -1}, "max_num_tokens must be at least 0, got -1"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"head_dim": 16.0}, "head_dim must be an int or None, got float"),
        ({"max_batch_size": 70000, "max_pages_per_request": 70000}, "must be below 2..31"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads, got 4 and 3"),
        ({"head_dim": 12}, "multiple of 8 from 16 to 256, got 12"),
        ({"dtype": torch.int8}, "float16, bfloat16 or float32, got torch.int8"),
    ],
)
def test_sizes_that_no_stage_can_have(changes: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        allocate(**changes)


@pytest.fixture(params=["kernel", "twin"] if env.INTERPRET else ["twin"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(env, "INTERPRET", request.param == "kernel")
    return str(request.param)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("table", ["dense", "csr"])
def test_update_pads_up_to_capacity(table: str) -> None:
    stage = allocate().stage(1)
    for tensor in stage.metadata().values():
        tensor.fill_(77)
    given: Metadata = {"qo_indptr": int32(0, 1, 4), "seq_lens": int32(9, 17)}
    if table == "dense":
        given["block_table"] = int32(3, 5, -1, 9, 2, 8).view(2, 3)
    else:
        # A slice of a larger table; the second request has a surplus page.
        given |= {"indptr": int32(2, 4, 7), "indices": int32(99, 99, 3, 5, 9, 2, 8)}
    stage.update(**given)
    assert stage.qo_indptr.tolist() == [0, 1, 4, 4, 4, 4, 4]
    assert stage.seq_lens.tolist() == [9, 17, 0, 0, 0, 0]
    assert (
        stage.block_table.tolist()
        == [[3, 5, -1, -1, -1, -1], [9, 2, 8, -1, -1, -1]] + [[-1] * 6] * 4
    )


@pytest.mark.usefixtures("implementation")
def test_a_smaller_step_leaves_nothing_of_a_larger_one() -> None:
    stage = allocate().stage(0)
    addresses = [tensor.data_ptr() for tensor in stage.metadata().values()]
    full = make_inputs(case((1,) * 6, (40, 3, 17, 9, 1, 33)))
    stage.update(qo_indptr=full.qo_indptr, seq_lens=full.seq_lens,
                 block_table=full.table["block_table"][:, :6])  # fmt: skip
    stage.update(
        qo_indptr=int32(0), seq_lens=int32(), block_table=torch.empty(0, 2, dtype=torch.int32)
    )
    assert stage.qo_indptr.tolist() == [0] * 7
    assert stage.seq_lens.tolist() == [0] * 6
    assert (stage.block_table == -1).all()
    assert [tensor.data_ptr() for tensor in stage.metadata().values()] == addresses


@pytest.mark.skipif(not env.INTERPRET, reason="kernels take CPU tensors in the interpreter only")
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-2, 7)), max_size=5), st.booleans())
def test_kernel_and_twin_agree(requests: list[tuple[int, int]], csr: bool) -> None:
    from tritonattn.kernels import stage_metadata as kernel

    pages = [max(0, count) for _, count in requests]
    starts = int32(3, *pages).cumsum(0).int()
    lengths = int32(*(8 * count for _, count in requests))
    qo_indptr = int32(0, *(length for length, _ in requests)).cumsum(0).int()
    ids = torch.arange(int(starts[-1]), dtype=torch.int32)
    if csr:
        table = PageTable.csr(starts, ids, lengths, 8)
    else:
        table = PageTable.dense(torch.arange(7 * len(requests)).int().view(-1, 7), lengths, 8)
    results = []
    for module in (kernel, twin):
        targets = [torch.full(shape, 77, dtype=torch.int32) for shape in ((7,), (6,), (6, 6))]
        module.stage_metadata(qo_indptr, table, *targets)
        results.append(targets)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def update_arguments(**changes: Any) -> dict[str, Any]:
    step = {"qo_indptr": int32(0, 1), "seq_lens": int32(8), "block_table": int32(0).view(1, 1)}
    return step | changes


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"qo_indptr": int32(*range(8)), "seq_lens": int32(*[1] * 7),
          "block_table": torch.zeros(7, 1, dtype=torch.int32)},
         "the batch has 7 requests, the stage holds max_batch_size = 6"),
        ({"block_table": torch.zeros(1, 7, dtype=torch.int32)},
         "block_table has 7 columns, the stage holds max_pages_per_request = 6"),
        ({"seq_lens": int32(49)}, "a request needs 7 pages, the stage holds max_pages_per_request"),
        ({"qo_indptr": int32(0, 49)}, "49 query tokens, the stage holds max_num_tokens = 48"),
        ({"qo_indptr": int32(1, 0)}, "qo_indptr must not decrease"),
        ({"qo_indptr": int32(0, 1, 2)}, "batch \\+ 1 = 2 entries .* got 3"),
        ({"seq_lens": torch.ones(1)}, "seq_lens must be int32, got torch.float32"),
        ({"indptr": int32(0, 1)}, "indptr and indices go together"),
        ({"indptr": int32(0, 1), "indices": int32(0)}, "exactly one of block_table"),
        ({"block_table": int32(0)}, "block_table must have 2 dimension"),
    ],
)  # fmt: skip
def test_update_refuses_and_leaves_the_stage_alone(changes: dict[str, Any], error: str) -> None:
    stage = allocate().stage(0)
    stage.update(**update_arguments())
    before = [tensor.clone() for tensor in stage.metadata().values()]
    with pytest.raises((ValueError, TypeError), match=error):
        stage.update(**update_arguments(**changes))
    after = stage.metadata().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("batch_size", [-1, 7])
def test_metadata_of_a_batch_over_capacity(batch_size: int) -> None:
    with pytest.raises(ValueError, match=f"has {batch_size} requests, the stage holds"):
        allocate().stage(0).metadata(batch_size)


CASES = [
    case((1, 1, 1), (5, 0, 40)),
    case((3, 12, 0, 1), (20, 12, 0, 33), table="csr"),
    case((9, 1), (33, 8), causal=False),
]


@pytest.mark.parametrize("step", CASES, ids=str)
def test_calls_are_right_in_a_poisoned_workspace(step: AttentionCase) -> None:
    stage = allocate().stage(1)
    inputs = make_inputs(step)
    for part in (stage.workspace.step, stage.workspace.call):
        part.fill_(0xFF)
    out = tritonattn.paged_attention(**inputs.arguments(), buffers=stage)
    assert_right(inputs, out)
    # In the stage's own metadata, at its size and at full capacity.
    stage.update(**metadata(inputs))
    for batch_size in (len(step.q_lens), 6):
        plan = tritonattn.plan_attention(
            inputs.q, inputs.kv_cache, **stage.metadata(batch_size), causal=step.causal,
            buffers=stage,
        )  # fmt: skip
        again = tritonattn.paged_attention(inputs.q, inputs.kv_cache, plan=plan, causal=step.causal)
        assert_right(inputs, again)


def test_stages_do_not_touch_each_other() -> None:
    buffers = allocate(3)
    inputs = make_inputs(CASES[0])
    others = [buffers.stage(0), buffers.stage(2)]
    parts = [p for stage in others for p in (stage.workspace.step, stage.workspace.call)]
    for part in parts:
        part.fill_(0xA5)
    buffers.stage(1).update(**metadata(inputs))
    tritonattn.paged_attention(**inputs.arguments(), buffers=buffers.stage(1))
    assert all((part == 0xA5).all() for part in parts)
    assert all((stage.block_table == -1).all() for stage in others)


@pytest.mark.skipif(not env.INTERPRET, reason="the reference has no work lists")
def test_a_plan_that_was_planned_over_is_refused() -> None:
    """Two plans of one stage would share their work lists: the older one must not run."""
    stage = allocate().stage(0)
    one, two = make_inputs(CASES[0]), make_inputs(CASES[1])
    first = tritonattn.plan_attention(one.q, one.kv_cache, **one.metadata(), buffers=stage)
    tritonattn.paged_attention(one.q, one.kv_cache, plan=first)
    tritonattn.plan_attention(two.q, two.kv_cache, **two.metadata(), buffers=stage)
    with pytest.raises(ValueError, match="stage 0 was planned anew"):
        tritonattn.paged_attention(one.q, one.kv_cache, plan=first)


def test_a_plan_and_other_buffers_are_refused() -> None:
    buffers = allocate()
    inputs = make_inputs(CASES[0])
    plan = tritonattn.plan_attention(
        inputs.q, inputs.kv_cache, **inputs.metadata(), buffers=buffers.stage(0)
    )
    with pytest.raises(ValueError, match="buffers are not those of the plan"):
        tritonattn.paged_attention(inputs.q, inputs.kv_cache, plan=plan, buffers=buffers.stage(1))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"dtype": torch.float16}, "for dtype torch.float16, the call has torch.bfloat16"),
        ({"num_qo_heads": 8}, "for num_qo_heads 8, the call has 4"),
        ({"num_qo_heads": 4, "num_kv_heads": 1}, "for num_kv_heads 1, the call has 2"),
        ({"head_dim": 32}, "for head_dim 32, the call has 16"),
        ({"page_size": 16}, "for page_size 16, the call has 8"),
        ({"max_batch_size": 2}, "the batch has 3 requests, the stage holds max_batch_size = 2"),
        ({"max_num_tokens": 4}, "q has 5 rows, the buffers hold max_num_tokens = 4"),
    ],
)
def test_buffers_that_do_not_fit_the_call(changes: dict[str, Any], error: str) -> None:
    inputs = make_inputs(CASES[0])
    out = torch.full_like(inputs.q, 7.0)
    stage = allocate(**changes).stage(0)
    with pytest.raises(ValueError, match=error):
        tritonattn.paged_attention(**inputs.arguments(), buffers=stage, out=out)
    assert (out == 7.0).all()


@pytest.mark.parametrize("wrong", [object(), torch.zeros(8), "stage"])
def test_buffers_of_another_kind(wrong: object) -> None:
    inputs = make_inputs(CASES[0])
    with pytest.raises(TypeError, match="buffers must be a stage"):
        tritonattn.paged_attention(**inputs.arguments(), buffers=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"PipelineBuffers\.allocate\(\.\.\.\)\.stage\(i\)"):
        tritonattn.paged_attention(**inputs.arguments(), buffers=allocate())  # type: ignore[arg-type]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("table", ["dense", "csr"])
def test_lengths_beyond_a_row_are_clamped_to_it(table: str) -> None:
    """The stage's table is wider than the caller's: what a row holds must not grow by that."""
    stage = allocate().stage(0)
    given: Metadata = {"qo_indptr": int32(0, 1, 2, 3), "seq_lens": int32(20, -4, 9)}
    if table == "dense":
        given["block_table"] = int32(3, 4, 5).view(3, 1)
    else:
        given |= {"indptr": int32(0, 1, 1, 1), "indices": int32(3)}
    stage.update(**given)
    assert stage.seq_lens.tolist()[:3] == ([8, 0, 8] if table == "dense" else [8, 0, 0])
    inputs = make_inputs(case((1, 1, 1), (17, 17, 17)))
    cache = torch.randn(inputs.kv_cache.shape).bfloat16()
    direct = tritonattn.paged_attention(inputs.q[:3], cache, **given)
    staged = tritonattn.paged_attention(inputs.q[:3], cache, **stage.metadata(3), buffers=stage)
    assert torch.equal(direct, staged)


def test_a_table_without_columns_goes_through_no_stage() -> None:
    stage = allocate().stage(0)
    nothing = torch.empty(1, 0, dtype=torch.int32)
    with pytest.raises(ValueError, match="block_table has no columns"):
        stage.update(qo_indptr=int32(0, 1), seq_lens=int32(8), block_table=nothing)
    with pytest.raises(ValueError, match="indices has no entries"):
        stage.update(qo_indptr=int32(0, 1), seq_lens=int32(8), indptr=int32(0, 0), indices=int32())
    stage.update(qo_indptr=int32(0, 1), seq_lens=int32(0), block_table=nothing, max_kv_len=0)
    assert stage.seq_lens.tolist() == [0] * 6


@pytest.mark.skipif(not env.INTERPRET, reason="the reference has no work lists")
def test_a_plan_of_the_step_before_is_refused() -> None:
    stage = allocate().stage(0)
    inputs = make_inputs(CASES[0])
    stage.update(**metadata(inputs))
    plan = tritonattn.plan_attention(inputs.q, inputs.kv_cache, **stage.metadata(3), buffers=stage)
    tritonattn.paged_attention(inputs.q, inputs.kv_cache, plan=plan)
    stage.update(**metadata(inputs))
    with pytest.raises(ValueError, match="planned anew or updated since this plan was made"):
        tritonattn.paged_attention(inputs.q, inputs.kv_cache, plan=plan)


def test_a_stage_is_not_its_own_source() -> None:
    stage = allocate().stage(0)
    stage.update(**update_arguments())
    before = [tensor.clone() for tensor in stage.metadata().values()]
    with pytest.raises(ValueError, match="qo_indptr lies in the buffers themselves"):
        stage.update(**stage.metadata(1))
    after = stage.metadata().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_capture_needs_a_gpu() -> None:
    stage: StageBuffers = allocate().stage(0)
    with pytest.raises(ValueError, match="need a stage on a GPU, this one is on cpu"):
        stage.capture([1, 2], lambda batch_size: None)
