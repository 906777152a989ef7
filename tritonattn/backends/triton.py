"""Our kernels as a backend: a device-side plan once a step, then one or two kernels a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonattn.backends import AttentionCall, Workspace, WorkspaceBytes, missing_features
from tritonattn.env import INTERPRET
from tritonattn.kernels import decode as decode_op
from tritonattn.kernels import plan as plan_op
from tritonattn.kernels import prefill as prefill_op
from tritonattn.kernels._config import on_device, within
from tritonattn.layout import PageTable
from tritonattn.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Work lists and scratch of one step."""

    work: plan_op.WorkLists
    partials: decode_op.Partials


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
        shapes = within(spec)
        return WorkspaceBytes(
            step=max(plan_op.workspace_bytes(shape) for shape in shapes),
            call=max(decode_op.workspace_bytes(shape) for shape in shapes),
        )

    def plan(
        self, spec: AttentionSpec, table: PageTable, qo_indptr: Tensor, workspace: Workspace
    ) -> TritonPlan:
        """Launch the planner.

        The work lists are read by every layer of a step, so they lie in the step's memory; partial
        states live within a run.
        """
        needed = WorkspaceBytes(plan_op.workspace_bytes(spec), decode_op.workspace_bytes(spec))
        workspace.check(spec, needed)
        lists, partials = (
            torch.empty(size, dtype=torch.uint8, device=spec.device)
            if have is None
            else have[:size]
            for have, size in zip((workspace.step, workspace.call), needed, strict=True)
        )
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
        spec, work = call.spec, state.work
        sm_scale_log2 = call.sm_scale * math.log2(math.e)
        lse_scale = 1.0 if call.lse_base == "log2" else math.log(2.0)
        layer = (spec, call.q, call.cache, call.table, work)
        with on_device(spec.device):
            if work.capacity.prefill:
                prefill_op.prefill(
                    *layer, call.out, call.lse, sm_scale_log2=sm_scale_log2, lse_scale=lse_scale
                )
            decode_op.decode(
                *layer,
                state.partials,
                call.out,
                call.lse,
                sm_scale_log2=sm_scale_log2,
                lse_scale=lse_scale,
            )


BACKEND = TritonBackend()
