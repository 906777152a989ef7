"""FlashInfer's decode wrappers as a CUDA graph holds them, without FlashInfer and without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.flashinfer_stand_in import SENTINEL, SPEC, StandInWrapper, made, make_call
from tritonattn import dispatch
from tritonattn.backends import UnsupportedError, Workspace, flashinfer
from tritonattn.cases import AttentionCase, make_inputs, reference_results
from tritonattn.graphs import CapturedStep, check_choices

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
    state = plan.state
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
    with pytest.raises(UnsupportedError, match="take one query token a request"):
        flashinfer.BACKEND.plan_for_graph(call.spec, call.table, call.qo_indptr, Workspace())


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
    import tritonattn

    monkeypatch.setattr(flashinfer.FlashInferBackend, "refusal", lambda self, spec: None)
    inputs = make_inputs(AttentionCase((1, 1), (9, 33), page_size=16))
    plans: dispatch.GraphPlans = {}

    def step() -> torch.Tensor:
        with dispatch.for_graphs(plans):
            plan = tritonattn.plan_attention(
                inputs.q, inputs.kv_cache, qo_indptr=inputs.qo_indptr, seq_lens=inputs.seq_lens,
                **inputs.table, max_q_len=1, backend="flashinfer",
            )  # fmt: skip
            return tritonattn.paged_attention(inputs.q, inputs.kv_cache, plan=plan)

    step()
    monkeypatch.setattr(flashinfer, "is_capturing", lambda device: True)
    out = step()
    assert len(made) == len(plans) == 1
    torch.testing.assert_close(out, reference_results(inputs)[0].to(out.dtype))
    inputs.seq_lens.copy_(torch.tensor([4, 20]))
    (plan,) = plans.values()
    assert plan is not None
    plan.replan()
    assert made[0].planned["table"].kv_lens()[:2].tolist() == [4, 20]
    plans.clear()
    with pytest.raises(UnsupportedError, match="did not plan this call before its capture"):
        step()


@pytest.mark.parametrize("asked", ["reference", "flashinfer"])
def test_a_graph_refuses_another_backend(asked: str) -> None:
    """Also one that no graph could hold: what is said is that this graph is another's."""
    step = CapturedStep(4, None, None, 0, (), (dispatch.Choice(SPEC, "auto", "triton"),), ())  # type: ignore[arg-type]
    check_choices(step)
    with (
        dispatch.use_backend(asked),
        pytest.raises(ValueError, match=f"captured with triton, now {asked} is asked for"),
    ):
        check_choices(step)
