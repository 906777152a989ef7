"""Our kernels as a backend: a device-side plan once a step, then one to three kernels a layer.

`triton:stream` serves short queries by even shares of all KV tiles in one launch. It is new and has
not been measured: "triton" does not take it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonattn.backends import AttentionCall, Workspace, WorkspaceBytes, missing_features
from tritonattn.env import INTERPRET
from tritonattn.kernels import decode as decode_op
from tritonattn.kernels import plan as plan_op
from tritonattn.kernels import prefill as prefill_op
from tritonattn.kernels import stream as stream_op
from tritonattn.kernels import stream_plan as stream_plan_op
from tritonattn.kernels._config import on_device, within
from tritonattn.layout import PageTable
from tritonattn.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Work lists and scratch of one step."""

    work: plan_op.WorkLists
    partials: decode_op.Partials


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Shares and scratch of one step, and the work lists of its longer queries."""

    work: plan_op.WorkLists
    shares: stream_plan_op.Shares
    partials: stream_op.Partials


class TritonBackend:
    """The Triton kernels."""

    name = "triton"
    caveat = ""

    def refusal(self, spec: AttentionSpec) -> str | None:
        """Return why the kernels cannot take the call, or None."""
        if spec.device.type not in ("cuda", "cpu"):
            return f"the triton backend needs CUDA (or ROCm) tensors, got device {spec.device}"
        if spec.device.type != "cpu" and INTERPRET:
            return "with TRITON_INTERPRET=1 the triton backend takes CPU tensors only"
        if spec.device.type == "cpu" and not INTERPRET:
            return (
                "the triton backend takes CPU tensors only in Triton's interpreter: set "
                "TRITON_INTERPRET=1 before Triton is imported"
            )
        return missing_features(spec, self.name)

    def graph_refusal(self, spec: AttentionSpec, replans: bool) -> None:
        """Everything can be captured."""

    def workspace_bytes(self, spec: AttentionSpec) -> WorkspaceBytes:
        """Return the sizes of the work lists and of the partial states."""
        needed = [self._needed(shape) for shape in within(spec)]
        return WorkspaceBytes(*(max(sizes) for sizes in zip(*needed, strict=True)))

    def _needed(self, spec: AttentionSpec) -> WorkspaceBytes:
        return WorkspaceBytes(plan_op.workspace_bytes(spec), decode_op.workspace_bytes(spec))

    def plan(
        self, spec: AttentionSpec, table: PageTable, qo_indptr: Tensor, workspace: Workspace
    ) -> TritonPlan:
        """Launch the planner.

        The work lists are read by every layer of a step, so they lie in the step's memory; partial
        states live within a run.
        """
        lists, partials = _memory(spec, workspace, self._needed(spec))
        work = plan_op.carve(spec, lists)
        with on_device(spec.device):
            plan_op.plan(spec, table, qo_indptr, work)
        return TritonPlan(work, decode_op.carve(spec, partials))

    def plan_for_graph(
        self, spec: AttentionSpec, table: PageTable, qo_indptr: Tensor, workspace: Workspace
    ) -> None:
        """Nothing: the plan is captured."""

    def run(self, call: AttentionCall, state: TritonPlan) -> None:
        """Launch the kernels whose lists can have entries; both paths write disjoint rows."""
        with on_device(call.spec.device):
            if state.work.capacity.prefill:
                _prefill(call, state.work)
            decode_op.decode(
                call.spec, call.q, call.cache, call.table, state.work, state.partials, call.out,
                call.lse, **_scales(call),
            )  # fmt: skip


class StreamBackend(TritonBackend):
    """The Triton kernels, short queries by even shares."""

    name = "triton:stream"
    caveat = "; not measured yet"

    def _needed(self, spec: AttentionSpec) -> WorkspaceBytes:
        step = stream_plan_op.workspace_bytes(spec) + plan_op.workspace_bytes(spec)
        return WorkspaceBytes(step, stream_op.workspace_bytes(spec))

    def plan(  # type: ignore[override]
        self, spec: AttentionSpec, table: PageTable, qo_indptr: Tensor, workspace: Workspace
    ) -> StreamPlan:
        """Launch the planner of shares, and that of query tiles where there can be any."""
        step, call = _memory(spec, workspace, self._needed(spec))
        # Shares first: they have words of 8 bytes.
        first = stream_plan_op.workspace_bytes(spec)
        shares = stream_plan_op.carve(spec, step[:first])
        work = plan_op.carve(spec, step[first:])
        with on_device(spec.device):
            if work.capacity.prefill:
                plan_op.plan(spec, table, qo_indptr, work)
            stream_plan_op.plan(spec, table, qo_indptr, shares)
        return StreamPlan(work, shares, stream_op.carve(spec, call))

    def run(self, call: AttentionCall, state: StreamPlan) -> None:  # type: ignore[override]
        """Launch the kernels whose lists can have entries; both paths write disjoint rows."""
        with on_device(call.spec.device):
            if state.work.capacity.prefill:
                _prefill(call, state.work)
            stream_op.stream(
                call.spec, call.q, call.cache, call.table, state.shares, state.partials, call.out,
                call.lse, **_scales(call),
            )  # fmt: skip


def _memory(
    spec: AttentionSpec, workspace: Workspace, needed: WorkspaceBytes
) -> tuple[Tensor, Tensor]:
    """Return the step's memory and the call's, of just the sizes that are needed."""
    workspace.check(spec, needed)
    step, call = (
        torch.empty(size, dtype=torch.uint8, device=spec.device) if have is None else have[:size]
        for have, size in zip((workspace.step, workspace.call), needed, strict=True)
    )
    return step, call


def _scales(call: AttentionCall) -> dict[str, float]:
    return {
        "sm_scale_log2": call.sm_scale * math.log2(math.e),
        "lse_scale": 1.0 if call.lse_base == "log2" else math.log(2.0),
    }


def _prefill(call: AttentionCall, work: plan_op.WorkLists) -> None:
    prefill_op.prefill(
        call.spec, call.q, call.cache, call.table, work, call.out, call.lse, **_scales(call)
    )


BACKEND = TritonBackend()


@functools.cache
def with_kernel(kernel: str) -> StreamBackend:
    """Return the backend with a kernel of its own for short queries."""
    assert kernel == "stream"
    return StreamBackend()
