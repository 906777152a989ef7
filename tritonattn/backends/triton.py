"""Our kernels as a backend: a device-side plan once a step, then one or two kernels a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonattn.backends import AttentionCall, check_scratch, missing_features
from tritonattn.env import INTERPRET
from tritonattn.kernels import decode as decode_op
from tritonattn.kernels import plan as plan_op
from tritonattn.kernels import prefill as prefill_op
from tritonattn.kernels._config import on_device
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

    def scratch_bytes(self, spec: AttentionSpec) -> int:
        """Return the size of the partial states, in bytes."""
        return decode_op.workspace_bytes(spec)

    def plan(
        self, spec: AttentionSpec, table: PageTable, qo_indptr: Tensor, scratch: Tensor | None
    ) -> TritonPlan:
        """Launch the planner.

        Only the partial states go to `scratch`: the work lists are read by every layer of a step
        and must not lie in memory that another step's layers may use in between.
        """
        needed = self.scratch_bytes(spec)
        if scratch is None:
            scratch = torch.empty(needed, dtype=torch.uint8, device=spec.device)
        check_scratch(spec, needed, scratch)
        lists = torch.empty(plan_op.workspace_bytes(spec), dtype=torch.uint8, device=spec.device)
        work = plan_op.carve(spec, lists)
        with on_device(spec.device):
            plan_op.plan(spec, table, qo_indptr, work)
        return TritonPlan(work, decode_op.carve(spec, scratch[:needed]))

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
