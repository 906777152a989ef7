"""FlashInfer's decode wrappers as a CUDA graph holds them, without FlashInfer and without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

import tritonattn
from tests.flashinfer_stand_in import SENTINEL, SPEC, StandInWrapper, made, make_call
from tritonattn import dispatch
from tritonattn.backends import UnsupportedError, Workspace, flashinfer, flashinfer_wrappers
from tritonattn.cases import AttentionCase, make_inputs, reference_results
from tritonattn.graph_step import GraphStep
from tritonattn.graphs import CapturedStep, check_choices
from tritonattn.kernels._config import Chip

__all__ = ["made"]


class _Event:
    """A stand-in for a CUDA event, which counts how often it was waited for."""

    waits = 0

    def synchronize(self) -> None:
        _Event.waits += 1

    def record(self) -> None:
        pass


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)


def decode_call(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], **fields: Any) -> Any:
    call, _ = make_call(make_inputs(AttentionCase(q_lens, kv_lens, page_size=16, **fields)))
    return replace(call, spec=replace(call.spec, max_q_len=1))


def check_rows(call: Any, inputs: Any, owned: list[int]) -> None:
    out, lse = reference_results(inputs)
    padding = [row for row in range(call.q.size(0)) if row not in owned]
    torch.testing.assert_close(call.out[owned], out[owned].to(call.out.dtype))
    torch.testing.assert_close(call.lse[owned], lse[owned].float())
    assert (call.out[padding] == SENTINEL).all()
    assert (call.lse[padding] == SENTINEL).all()


@pytest.mark.parametrize("kernel", ["auto", "decode", "tc"])
@pytest.mark.parametrize("table", ["dense", "csr"])
def test_a_plan_is_made_anew_in_place(made: list[StandInWrapper], kernel: str, table: Any) -> None:
    """Rows of no request, requests without keys or queries: the wrapper's batch size stays."""
    case = AttentionCase((1, 0, 1, 1), (9, 33, 0, 40), page_size=16, table=table)
    inputs = make_inputs(case)
    call, _ = make_call(inputs)
    call = replace(call, spec=replace(call.spec, max_q_len=1))
    backend = flashinfer.with_kernel(kernel)
    plan = backend.plan_for_graph(call.spec, call.table, call.qo_indptr, Workspace())
    assert plan is not None
    state = plan.state
    backend.run(call, state)
    check_rows(call, inputs, [])
    plan.replan()
    backend.run(call, state)
    check_rows(call, inputs, [0, 1, 2])

    # A step later: other lengths, and the first row is padding now.
    inputs.qo_indptr.copy_(torch.tensor([1, 2, 2, 2, 3]))
    inputs.seq_lens.copy_(torch.tensor([1, 5, 0, 17]))
    call.out.fill_(SENTINEL)
    call.lse.fill_(SENTINEL)
    waits = _Event.waits
    plan.replan()
    assert _Event.waits == waits + 1, "the staging memory of the plan before was not waited for"
    backend.run(call, state)
    check_rows(call, inputs, [1, 2])
    assert len(made) == 1


def test_sizes_share_the_memory_of_a_stage(made: list[StandInWrapper]) -> None:
    workspace = Workspace()
    for batch in (4, 2, 1):
        call = decode_call((1,) * batch, (40, 9, 7, 3)[:batch])
        flashinfer.BACKEND.plan_for_graph(call.spec, call.table, call.qo_indptr, workspace)
    addresses = {
        (w.workspace.data_ptr(), w.paged_kv_indptr_buffer.data_ptr(),
         w.paged_kv_indices_buffer.data_ptr(), w.paged_kv_last_page_len_buffer.data_ptr())
        for w in made
    }  # fmt: skip
    assert len(addresses) == 1
    assert len(made) == 3


def test_xqa_in_place(made: list[StandInWrapper]) -> None:
    inputs = make_inputs(AttentionCase((1, 0, 1), (9, 33, 40), page_size=16))
    call, _ = make_call(inputs)
    call = replace(call, lse=None, spec=replace(call.spec, max_q_len=1))
    backend = flashinfer.with_kernel("xqa")
    plan = backend.plan_for_graph(call.spec, call.table, call.qo_indptr, Workspace())
    assert plan is not None
    table = plan.state.wrapper.block_table
    inputs.seq_lens.copy_(torch.tensor([3, 33, 35]))
    plan.replan()
    backend.run(call, plan.state)
    assert plan.state.wrapper.block_table is table
    assert table.is_contiguous()
    expected = reference_results(inputs)[0][:2].to(call.out.dtype)
    torch.testing.assert_close(call.out[:2], expected)
    assert not made


def test_more_than_one_token_of_a_request(made: list[StandInWrapper]) -> None:
    """The bound said 1, the lengths say 2."""
    call = decode_call((1, 2), (9, 33))
    plan = flashinfer.BACKEND.plan_for_graph(call.spec, call.table, call.qo_indptr, Workspace())
    assert plan is not None
    with pytest.raises(UnsupportedError, match="max_q_len=1, a request has 2 query tokens"):
        plan.replan()


def test_every_row_has_a_page(made: list[StandInWrapper]) -> None:
    """The planner counts nothing for a row without pages, lists it, and drops what comes after."""
    inputs = make_inputs(AttentionCase((1, 1, 0, 1, 1), (0, 33, 7, 0, 40), page_size=16))
    inputs.table["block_table"][0] = -1
    call, _ = make_call(inputs)
    spec = replace(call.spec, max_q_len=1)
    plan = flashinfer.BACKEND.plan_for_graph(spec, call.table, call.qo_indptr, Workspace())
    assert plan is not None
    plan.replan()
    rows = made[0].planned["table"]
    lengths = rows.kv_lens().tolist()
    assert lengths == [1, 33, 1, 40, *[1] * (call.q.size(0) - 4)]
    assert rows.page_ids[0] == 0


def test_a_workspace_as_large_as_the_partial_states(
    made: list[StandInWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 requests of Llama-3 70B: FlashInfer's own planner asks for this much, 386 MiB."""
    monkeypatch.setattr(flashinfer_wrappers, "chip", lambda device: Chip(132, True))
    spec = replace(SPEC, num_qo_heads=64, num_kv_heads=8, head_dim_qk=128, head_dim_vo=128)
    spec = replace(spec, batch_size=512, total_q=512)
    tiles = 512 * 8 // 16 + 511
    needed = 64 * tiles * 16 * (128 + 1) * 4
    assert flashinfer_wrappers._partials_bytes(spec) == needed
    assert needed > 384 * 2**20
    # A wide group: one KV head, tiles of 64 rows, two programs a multiprocessor.
    spec = replace(spec, num_kv_heads=1, total_q=2)
    assert flashinfer_wrappers._partials_bytes(spec) == 64 * 264 * 64 * 129 * 4


def test_a_csr_table_takes_what_all_its_rows_hold(made: list[StandInWrapper]) -> None:
    call = decode_call((1, 1, 1), (9, 33, 40), table="csr")
    flashinfer.BACKEND.plan_for_graph(call.spec, call.table, call.qo_indptr, Workspace())
    entries = call.table.page_ids.numel() + call.spec.total_q
    assert made[0].paged_kv_indices_buffer is not None
    assert made[0].paged_kv_indices_buffer.numel() == entries


def test_no_rows(made: list[StandInWrapper]) -> None:
    call = decode_call((1, 1), (9, 33))
    spec = replace(call.spec, total_q=0)
    backend = flashinfer.BACKEND
    arguments = (spec, call.table, call.qo_indptr, Workspace())
    assert backend.plan_for_graph(*arguments) is None
    assert backend.plan(*arguments) is None
    assert not made


def test_what_graphs_cannot_hold() -> None:
    for kernel, max_q_len in (("auto", 2), ("fa2", 1), ("fa3", 1)):
        backend = flashinfer.with_kernel(kernel)
        refusal = backend.graph_refusal(replace(SPEC, max_q_len=max_q_len), True)
        assert refusal is not None
        assert "capture decode with max_q_len=1" in refusal
    assert flashinfer.BACKEND.graph_refusal(SPEC, True) is None
    assert "capture by stage.capture" in (flashinfer.BACKEND.graph_refusal(SPEC, False) or "")


def test_calls_find_their_plan_again(
    made: list[StandInWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up plans, the capture takes that plan, a replay makes it anew."""
    monkeypatch.setattr(flashinfer.FlashInferBackend, "refusal", lambda self, spec: None)
    inputs = make_inputs(AttentionCase((1, 1), (9, 33), page_size=16))
    graph_step = GraphStep({})
    arguments: dict[str, Any] = {
        "qo_indptr": inputs.qo_indptr, "seq_lens": inputs.seq_lens, **inputs.table,
        "max_q_len": 1, "backend": "flashinfer",
    }  # fmt: skip

    def step(times: int = 1) -> torch.Tensor:
        out = inputs.q
        with graph_step.run():
            for _ in range(times):
                plan = tritonattn.plan_attention(inputs.q, inputs.kv_cache, **arguments)
                out = tritonattn.paged_attention(inputs.q, inputs.kv_cache, plan=plan)
        return out

    step()
    with pytest.raises(UnsupportedError, match="whose graphs plan once before each replay"):
        step(times=2)
    monkeypatch.setattr(flashinfer, "is_capturing", lambda device: True)
    assert graph_step.made is not None
    graph_step.made.replan()
    out = step()
    assert len(made) == 1
    torch.testing.assert_close(out, reference_results(inputs)[0].to(out.dtype))
    inputs.seq_lens.copy_(torch.tensor([4, 20]))
    graph_step.made.replan()
    assert made[0].planned["table"].kv_lens()[:2].tolist() == [4, 20]
    arguments["seq_lens"] = inputs.seq_lens.clone()
    with pytest.raises(UnsupportedError, match="metadata at the same place"):
        step()


def test_a_step_that_updates_its_stage(made: list[StandInWrapper], monkeypatch: Any) -> None:
    """The update is in the graph, the plan before it: refused, not stale."""
    monkeypatch.setattr(flashinfer.FlashInferBackend, "refusal", lambda self, spec: None)
    inputs = make_inputs(AttentionCase((1, 1), (9, 33), page_size=16))
    stage = tritonattn.PipelineBuffers.allocate(
        num_stages=1, max_batch_size=4, max_num_tokens=inputs.q.size(0), max_pages_per_request=8,
        num_qo_heads=inputs.q.size(1), num_kv_heads=inputs.kv_cache[0].size(-2),
        head_dim=inputs.q.size(2), page_size=16, dtype=inputs.q.dtype, device="cpu",
    ).stage(0)  # fmt: skip
    metadata: dict[str, Any] = {"qo_indptr": inputs.qo_indptr, "seq_lens": inputs.seq_lens}

    def plan() -> None:
        tritonattn.plan_attention(
            inputs.q, inputs.kv_cache, qo_indptr=stage.qo_indptr, seq_lens=stage.seq_lens,
            block_table=stage.block_table, max_q_len=1, buffers=stage, backend="flashinfer",
        )  # fmt: skip

    with GraphStep({}).run():
        plan()
    with GraphStep({}).run():
        stage.update(**metadata, **inputs.table)
        with pytest.raises(UnsupportedError, match="write the metadata of a step outside of it"):
            plan()


def test_sizes_without_a_stage_share_memory(made: list[StandInWrapper], monkeypatch: Any) -> None:
    monkeypatch.setattr(flashinfer.FlashInferBackend, "refusal", lambda self, spec: None)
    kept: dict[str, Any] = {}
    for batch in (4, 2):
        inputs = make_inputs(AttentionCase((1,) * batch, (40, 9, 7, 3)[:batch], page_size=16))
        with GraphStep(kept).run():
            tritonattn.paged_attention(
                **{**inputs.arguments(), "max_q_len": 1, "backend": "flashinfer"}
            )
    assert made[0].workspace.data_ptr() == made[1].workspace.data_ptr()


def test_a_graph_refuses_another_backend() -> None:
    """If it is asked for by name; what the step itself asks for stays its own."""
    own = dispatch.Choice(("reference", "use_backend"), "reference")
    outer = dispatch.Choice(("auto", ""), "triton")
    step = CapturedStep(4, cast(Any, None), None, 0, None, (own, outer), ("auto", ""))
    check_choices(step)
    for asked in ("reference", "flashinfer"):
        with (
            dispatch.use_backend(asked),
            pytest.raises(
                ValueError, match=f"with triton, now {asked} is asked for by use_backend"
            ),
        ):
            check_choices(step)
    with dispatch.use_backend("triton"):
        check_choices(step)
    by_name = replace(step, choices=(own,), asked=("reference", "use_backend"))
    check_choices(by_name)
    with dispatch.use_backend("triton"), pytest.raises(ValueError, match="captured with reference"):
        check_choices(by_name)
