"""vLLM's CUSTOM backend against vLLM's own classes: the steps that vLLM passes."""

from __future__ import annotations

import math

import pytest
import torch

from tritonattn import env

pytest.importorskip("vllm.v1.attention.backend", reason="vLLM is not installed")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport

from tests import vllm_steps
from tests.vllm_steps import (
    DIM,
    HEADS,
    KV_HEADS,
    MAX_REQS,
    MAX_TOKENS,
    SCALE,
    Step,
    layout,
    make_builder,
    nhd,
    run,
)
from tritonattn.engines.vllm_backend import TritonAttnImpl

__all__ = ["layout", "nhd"]  # fixtures


@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [([1, 1, 1], [5, 33, 128]), ([17, 1, 9], [17, 40, 25]), ([1], [1]), ([40], [100])],
    ids=["decode", "mixed", "first", "chunk"],
)
@pytest.mark.parametrize(("pad_reqs", "pad_tokens"), [(0, 0), (3, 5)], ids=["exact", "padded"])
def test_steps_are_right(
    layout: str, q_lens: list[int], kv_lens: list[int], pad_reqs: int, pad_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    builder = make_builder(monkeypatch)
    for seed in range(2):
        step = Step(q_lens, kv_lens, pad_reqs, pad_tokens, seed)
        out = run(step, builder)
        rows = sum(q_lens)
        torch.testing.assert_close(out[:rows], step.expected().float(), rtol=1e-4, atol=1e-4)
        assert (out[rows:] == 7.0).all()


def test_a_plan_serves_what_stands_there_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's plan is launched anew over the same tensors: for longer queries than captured."""
    builder = make_builder(monkeypatch, CUDAGraphMode.FULL)
    captured = Step([5] * MAX_REQS, [9] * MAX_REQS)
    metadata = builder.build_for_cudagraph_capture(captured.common)
    later = Step([33, 7], [120, 40], pad_reqs=MAX_REQS - 2)
    for name in ("query_start_loc", "seq_lens", "block_table_tensor"):
        place, new = getattr(captured.common, name), getattr(later.common, name)
        place[: new.size(0)].copy_(new)
    impl = TritonAttnImpl(HEADS, DIM, SCALE, KV_HEADS)
    output = torch.full_like(captured.q, 7.0)
    impl.do_kv_cache_update(None, later.new_k, later.new_v, later.cache, later.slots)
    impl.forward(None, later.q, later.new_k, later.new_v, later.cache, metadata, output)
    torch.testing.assert_close(output, later.expected().float(), rtol=1e-4, atol=1e-4)


def test_a_step_at_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = make_builder(monkeypatch)
    step = Step([MAX_TOKENS - MAX_REQS + 1, *[1] * (MAX_REQS - 1)], [128, *range(1, MAX_REQS)])
    out = run(step, builder)
    torch.testing.assert_close(out, step.expected().float(), rtol=1e-4, atol=1e-4)


def test_buffers_do_not_grow_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are vLLM's own: at a million tokens a copy would take hundreds of MiB."""
    sizes = []
    for length in (128, 1 << 20):
        monkeypatch.setattr(vllm_steps, "MAX_LEN", length)
        stage = make_builder(monkeypatch)._stage
        sizes.append(stage.workspace.step.nbytes + stage.block_table.nbytes)  # type: ignore[union-attr]
    assert sizes[0] == sizes[1]


def test_layers_that_share_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that shares an earlier layer's writes nothing: vLLM does not ask it to."""
    builder, step = make_builder(monkeypatch), Step([1, 2], [30, 9])
    metadata = builder.build(0, step.common)
    writer = TritonAttnImpl(HEADS, DIM, SCALE, KV_HEADS)
    sharer = TritonAttnImpl(
        HEADS, DIM, SCALE, KV_HEADS, kv_sharing_target_layer_name="model.layers.0"
    )
    writer.do_kv_cache_update(None, step.new_k, step.new_v, step.cache, step.slots)
    output = torch.empty_like(step.q)
    sharer.forward(None, step.q, step.new_k, step.new_v, step.cache, metadata, output)
    torch.testing.assert_close(output, step.expected().float(), rtol=1e-4, atol=1e-4)


def test_a_policy_does_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """It might choose what waits for the device; a backend that is named is taken."""
    step = Step([1], [9])
    assert make_builder(monkeypatch).build(0, step.common).plan.backend == "triton"
    monkeypatch.setenv("TRITONATTN_BACKEND", "reference")
    assert make_builder(monkeypatch).build(0, step.common).plan.backend == "reference"
    out = run(step, make_builder(monkeypatch))
    torch.testing.assert_close(out, step.expected().float(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not env.INTERPRET, reason="outside the interpreter nothing plans on the CPU")
def test_a_step_is_planned_once(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """By its first layer, so that a graph holds the plan; describing a step launches nothing."""
    from tritonattn.backends.triton import TritonBackend

    planned = []
    plan = TritonBackend.plan
    monkeypatch.setattr(TritonBackend, "plan", lambda self, *a: planned.append(1) or plan(self, *a))
    builder, step = make_builder(monkeypatch), Step([1, 3], [20, 30])
    builder.build(0, step.common)
    builder.build_for_cudagraph_capture(step.common)
    assert not planned
    run(step, builder, layers=3)
    assert len(planned) == 1


@pytest.mark.parametrize(
    ("mode", "bound"),
    [
        (CUDAGraphMode.FULL, None), (CUDAGraphMode.FULL_DECODE_ONLY, 1),
        (CUDAGraphMode.FULL_AND_PIECEWISE, 1),
    ],
    ids=str,
)  # fmt: skip
def test_a_graph_of_mixed_steps_takes_longer_queries_than_its_capture(
    mode: CUDAGraphMode, bound: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM captures 4 tokens as 4 requests of one, and replays it for one request of four."""
    builder, capture = make_builder(monkeypatch, mode), Step([1] * 4, [9] * 4)
    assert builder.build_for_cudagraph_capture(capture.common).plan.max_q_len == bound
    assert builder.build(0, capture.common).plan.max_q_len == 1


def test_the_profiling_run_has_no_metadata() -> None:
    impl = TritonAttnImpl(HEADS, DIM, 1.0, KV_HEADS)
    q, kv = torch.randn(5, HEADS, DIM), torch.randn(5, KV_HEADS, DIM)
    output = torch.full_like(q, math.nan)
    assert impl.forward(None, q, kv, kv, torch.empty(0), None, output) is output
    assert not output.any()


def test_what_a_step_may_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    builder, step = make_builder(monkeypatch), Step([1], [9])
    impl = TritonAttnImpl(HEADS, DIM, 1.0, KV_HEADS)
    step.common.causal = torch.tensor([True])
    with pytest.raises(NotImplementedError, match="causal attention only"):
        builder.build(0, step.common)
    with pytest.raises(NotImplementedError, match="does not quantise its output"):
        impl.forward(
            None, step.q, step.new_k, step.new_v, step.cache, None, step.q, torch.ones(1)
        )  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "support"),
    [
        ("auto", AttentionCGSupport.ALWAYS), ("triton", AttentionCGSupport.ALWAYS),
        ("flashinfer", AttentionCGSupport.NEVER), ("reference", AttentionCGSupport.NEVER),
    ],
)  # fmt: skip
def test_graphs_are_for_what_plans_on_the_device(
    backend: str, support: AttentionCGSupport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITONATTN_BACKEND", backend)
    builder = make_builder(monkeypatch)
    assert builder.get_cudagraph_support(builder.vllm_config, builder.kv_cache_spec) == support
