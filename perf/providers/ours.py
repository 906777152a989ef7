"""`triton`, our kernels, and `reference`, the plain torch that they are checked against."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import tritonattn
from tritonattn.cases import reference_results
from tritonattn.graph_step import GraphStep
from tritonattn.perf.providers import (
    ATTENTION_KINDS,
    ORACLE,
    OURS,
    PEER,
    Call,
    Layer,
    Prepared,
    Provider,
    register,
)
from tritonattn.perf.providers.block_ops import BLOCK_KINDS, prepare_ours
from tritonattn.perf.steps import AnyStep, BlockStep, Step
from tritonattn.plan import AttentionPlan

# The reference goes through a batch request by request, in no hurry.
MAX_REFERENCE_FLOPS = 2e9


def _metadata(step: Step) -> dict[str, Any]:
    return {
        "qo_indptr": step.qo_indptr,
        "seq_lens": step.seq_lens,
        "block_table": step.block_table,
        "kv_layout": step.kv_layout,
        "causal": step.case.causal,
        "max_q_len": step.max_q_len,
    }


def _features(step: Step) -> dict[str, Any]:
    case = step.case
    return {"window_left": case.window_left, "logits_soft_cap": case.logits_soft_cap}


def _refusal(step: AnyStep, backend: str = "triton") -> str | None:
    if not isinstance(step, Step):
        return None
    layer = step.layers[0]
    options = _metadata(step) | _features(step)
    explained = tritonattn.explain(layer.q, layer.kv_cache, **options, backend=backend)
    return None if explained.backend else explained.reason


def _graph_refusal(step: AnyStep) -> str | None:
    if isinstance(step, BlockStep) and step.case.what != "copy_blocks":
        return "swap_blocks takes its pairs on the host, and a CUDA graph cannot"
    return None


def _prepare(step: AnyStep) -> Prepared:
    return _prepare_attention(step) if isinstance(step, Step) else prepare_ours(step)


def _prepare_attention(step: Step, backend: str = "triton") -> Prepared:
    plans: list[Any] = []

    def plan() -> None:
        # Stated: the automatic choice may be a peer.
        plans[:] = [_plan(step, backend)]

    return _layers(step, plans, plan)


def _prepare_as_captured(step: Step, backend: str) -> Prepared:
    """Plan decode as the graphs of a stage do: on the host in place, before each replay."""
    if step.max_q_len > 1:
        return _prepare_attention(step, backend)
    graph_step = GraphStep({})
    plans: list[Any] = []

    def plan() -> None:
        if graph_step.made is None:
            with graph_step.run():
                plans[:] = [_plan(step, backend)]
        on_host = graph_step.made
        if on_host is not None:
            on_host.replan()

    return _layers(step, plans, plan)


def _plan(step: Step, backend: str) -> AttentionPlan:
    first = step.layers[0]
    return tritonattn.plan_attention(first.q, first.kv_cache, **_metadata(step), backend=backend)


def _layers(step: Step, plans: list[Any], plan: Callable[[], None]) -> Prepared:
    """Bind layers to the plan that `plan` leaves in `plans`."""

    def bind(layer: Layer) -> Call:
        return partial(
            tritonattn.paged_attention,
            layer.q,
            layer.kv_cache,
            kv_layout=step.kv_layout,
            causal=step.case.causal,
            plan=plans[0],
            out=layer.out,
        )

    return Prepared(bind, plan)


def through(backend: str) -> Provider:
    """Return a provider of a backend of this library, or of "auto", the way that dispatch takes."""
    return Provider(
        backend, OURS if backend == "triton" else PEER, ATTENTION_KINDS,
        partial(_prepare_as_captured, backend=backend), partial(_refusal, backend=backend),
    )  # fmt: skip


def _reference_refusal(step: Step) -> str | None:
    if step.flops > MAX_REFERENCE_FLOPS:
        return f"the reference is not timed beyond {MAX_REFERENCE_FLOPS:g} operations"
    return None if not step.case.features else "the reference has no optional features yet"


def _prepare_reference(step: Step) -> Prepared:
    inputs, total_q = step.inputs, sum(step.q_lens)

    def run() -> torch.Tensor:
        return reference_results(inputs, step.dtype)[0][:total_q]

    return Prepared(lambda layer: run)


register(
    Provider("triton", OURS, ATTENTION_KINDS | BLOCK_KINDS, _prepare, _refusal, _graph_refusal)
)
register(
    Provider("reference", ORACLE, ATTENTION_KINDS, _prepare_reference, _reference_refusal,
             lambda step: "the reference reads lengths on the host")
)  # fmt: skip
