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
from tritonattn.layout import PageTable
from tritonattn.spec import AttentionSpec

_ALIGNMENT = 256  # bytes


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Work lists and scratch of one step."""

    work: plan_op.WorkLists
    partials: decode_op.Partials


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def workspace_bytes(spec: AttentionSpec) -> int:
    """Return the bytes that a plan and its kernels need for any batch of the spec's shape."""
    return _aligned(plan_op.workspace_bytes(spec)) + _aligned(decode_op.workspace_bytes(spec))


class TritonBackend:
    """The Triton kernels."""

    name = "triton"

    def refusal(self, spec: AttentionSpec) -> str | None:
        """Return why the kernels cannot take the call, or None."""
        if spec.device.type not in ("cuda", "cpu"):
            return f"the triton backend needs CUDA (or ROCm) tensors, got device {spec.device}"
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
        self,
        spec: AttentionSpec,
        table: PageTable,
        qo_indptr: Tensor,
        workspace: Tensor | None,
        scratch: Tensor | None = None,
    ) -> TritonPlan:
        """Launch the planner into `workspace` (uint8), or into memory of its own.

        With `scratch` (uint8) only the partial states go there: the work lists are read by every
        layer of a step and must not lie in memory that another step's layers use in between.
        """
        if scratch is not None:
            check_scratch(spec, self.scratch_bytes(spec), scratch)
            lists = torch.empty(
                plan_op.workspace_bytes(spec), dtype=torch.uint8, device=spec.device
            )
            return self._plan(spec, table, qo_indptr, lists, scratch)
        needed = workspace_bytes(spec)
        if workspace is None:
            workspace = torch.empty(needed, dtype=torch.uint8, device=spec.device)
        elif workspace.numel() < needed:
            raise ValueError(
                f"the workspace must have at least {needed} bytes for batch {spec.batch_size}, "
                f"{spec.total_q} query tokens and {spec.num_qo_heads}/{spec.num_kv_heads} heads of "
                f"{spec.head_dim_vo}, got {workspace.numel()}"
            )
        lists_bytes = plan_op.workspace_bytes(spec)
        return self._plan(
            spec, table, qo_indptr, workspace[:lists_bytes], workspace[_aligned(lists_bytes) :]
        )

    def _plan(
        self,
        spec: AttentionSpec,
        table: PageTable,
        qo_indptr: Tensor,
        lists: Tensor,
        scratch: Tensor,
    ) -> TritonPlan:
        work = plan_op.carve(spec, lists)
        partials = decode_op.carve(spec, scratch[: decode_op.workspace_bytes(spec)])
        plan_op.plan(spec, table, qo_indptr, work)
        return TritonPlan(work, partials)

    def run(self, call: AttentionCall, state: TritonPlan) -> None:
        """Launch the kernels whose lists can have entries; both paths write disjoint rows."""
        spec, work = call.spec, state.work
        scales = {
            "sm_scale_log2": call.sm_scale * math.log2(math.e),
            "lse_scale": 1.0 if call.lse_base == "log2" else math.log(2.0),
        }
        layer = (spec, call.q, call.cache, call.table, work)
        if work.capacity.prefill:
            prefill_op.prefill(*layer, call.out, call.lse, **scales)
        decode_op.decode(*layer, state.partials, call.out, call.lse, **scales)


BACKEND = TritonBackend()
