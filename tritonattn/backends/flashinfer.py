"""FlashInfer as a backend: the peer to compare with. Imported here only, and only when asked for.

Its planner runs on the host, so `plan` synchronizes and cannot be captured in a CUDA graph;
`StageBuffers.capture` plans before each replay instead, which only its decode kernels allow. What
it gets wrong is avoided where possible: requests without queries are left out, tables are rebuilt
from the lengths, rows that see no key are repaired. What is left: NaN in unread slots of a last
page reaches the output, and logits below -5e4 (log2) count as masked.

What is installed is judged in `flashinfer_package`, its wrappers are planned in
`flashinfer_wrappers`.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from tritonattn.backends import (
    AttentionCall,
    UnsupportedError,
    Workspace,
    WorkspaceBytes,
    missing_features,
)
from tritonattn.backends.flashinfer_package import import_problem
from tritonattn.backends.flashinfer_wrappers import (
    FlashInferGraphPlan,
    FlashInferPlan,
    mask_of,
    pages_of,
    planned_wrapper,
    query_rows,
    starts_of,
)
from tritonattn.layout import PageTable
from tritonattn.spec import AttentionSpec
from tritonattn.staging import is_capturing

# Others compile, and are wrong or refused: FlashInfer's tiles are whole multiples of 64.
HEAD_DIMS = (64, 128, 256)
# Of its decode kernel without tensor cores.
DECODE_GROUP_SIZES = (1, 2, 3, 4, 8)
# Shorter queries leave most of fa3's tile empty: fa2 is the faster one there.
FA3_MIN_Q_LEN = 64
XQA_PAGE_SIZES = (16, 32, 64, 128)
_IN_A_CAPTURE = (
    "the flashinfer backend plans on the host, which a CUDA graph cannot repeat: capture by "
    "stage.capture, whose graphs plan once before each replay, and write the metadata of a step "
    "outside of it"
)


class FlashInferBackend:
    """One of FlashInfer's kernels, or the one that suits the lengths of a step.

    `decode` (CUDA cores), `tc` (decode on tensor cores), `fa2`, `fa3`: its wrappers; `xqa`: decode
    through `trtllm_batch_decode_with_kv_cache`, which has no LSE.
    """

    caveat = (
        "; plans on the host, so it synchronizes, and each replay of a CUDA graph does; NaN in "
        "unused slots of a last page reaches the output"
    )

    def __init__(self, kernel: str = "auto") -> None:
        self.kernel = kernel
        self.name = "flashinfer" if kernel == "auto" else f"flashinfer:{kernel}"

    def refusal(self, spec: AttentionSpec) -> str | None:
        """Return why FlashInfer cannot take the call, or None."""
        if spec.device.type != "cuda":
            return f"the {self.name} backend needs CUDA tensors, got device {spec.device}"
        if spec.q_dtype == torch.float32:
            return f"the {self.name} backend takes float16 and bfloat16, got float32"
        if spec.head_dim_qk != spec.head_dim_vo:
            return (
                f"the {self.name} backend takes one head_dim for q, k and v, got "
                f"{spec.head_dim_qk} and {spec.head_dim_vo}"
            )
        if spec.head_dim_qk not in HEAD_DIMS:
            return f"FlashInfer is right for head_dim {HEAD_DIMS} only, got {spec.head_dim_qk}"
        return (
            missing_features(spec, self.name)
            or _kernel_refusal(self.kernel, spec)
            or import_problem()
        )

    def graph_refusal(self, spec: AttentionSpec, replans: bool) -> str | None:
        """Return why a CUDA graph cannot hold the call, or None."""
        if not replans:
            return _IN_A_CAPTURE
        if spec.max_q_len > 1 or self.kernel in ("fa2", "fa3"):
            return (
                "FlashInfer's prefill kernels take their grid from the lengths of a step, which a "
                "CUDA graph cannot: capture decode with max_q_len=1, or take the triton backend"
            )
        return None

    def workspace_bytes(self, spec: AttentionSpec) -> WorkspaceBytes:
        """Return 0: FlashInfer's workspace is taken when it is first asked for."""
        return WorkspaceBytes(0, 0)

    def plan(
        self, spec: AttentionSpec, table: PageTable, qo_indptr: Tensor, workspace: Workspace
    ) -> FlashInferPlan | None:
        """Plan FlashInfer's wrapper for the requests that have queries; None if there are none."""
        if not spec.total_q:
            return None
        if is_capturing(spec.device):
            raise UnsupportedError(_IN_A_CAPTURE)
        begins, q_lens = query_rows(qo_indptr, spec.total_q)
        live = (q_lens > 0).nonzero().flatten()
        if not live.numel():
            return None
        q_lens, kv_lens = q_lens[live], table.kv_lens().cpu()[live]
        first = int(begins[live[0]])
        starts = starts_of(q_lens)
        kernel = _kernel_for(spec, int(q_lens.min()), int(q_lens.max()), self.kernel)
        pages = pages_of(table, live, kv_lens)
        wrapper = planned_wrapper(kernel, spec, starts, pages, workspace)
        # Of a causal request with more queries than keys the first queries stand before all keys.
        hidden = (q_lens - kv_lens).clamp(min=0) if spec.causal else q_lens * (kv_lens == 0)
        rows = int(starts[-1])
        dead = mask_of(starts[:-1], hidden, rows).to(spec.device) if hidden.any() else None
        return FlashInferPlan(wrapper, slice(first, first + rows), dead)

    def plan_for_graph(
        self, spec: AttentionSpec, table: PageTable, qo_indptr: Tensor, workspace: Workspace
    ) -> FlashInferGraphPlan | None:
        """Plan a wrapper that a CUDA graph can hold; None if there is nothing to plan."""
        if not spec.total_q:
            return None
        if is_capturing(spec.device):
            raise UnsupportedError(
                "flashinfer has no plan for this call, which the run before the capture did not "
                "make: a step must make the same calls each time, with metadata at the same place, "
                "as stage.metadata(batch_size) returns it"
            )
        kernel = _kernel_for(spec, 1, 1, self.kernel)
        return FlashInferGraphPlan(kernel, spec, table, qo_indptr, workspace)

    def run(self, call: AttentionCall, state: FlashInferPlan | None) -> None:
        """Write the rows that belong to requests."""
        if state is None:
            return
        # The views are NHD whatever the layout is; their strides say where things are.
        k, v = call.cache.k, call.cache.v
        if k.stride() != v.stride():
            raise UnsupportedError(
                f"FlashInfer needs equal strides of k and v, got {k.stride()} and {v.stride()}"
            )
        out = call.out[state.rows]
        lse = None if call.lse is None else call.lse[state.rows]
        # FlashInfer writes packed rows, and all of them.
        own = out.is_contiguous() and state.live is None
        dense_out = out if own else torch.empty_like(out, memory_format=torch.contiguous_format)
        dense_lse = None
        if lse is not None:
            own = lse.is_contiguous() and state.live is None
            dense_lse = lse if own else torch.empty_like(lse, memory_format=torch.contiguous_format)
        # It was planned with sm_scale 1; q_scale multiplies that.
        state.wrapper.run(
            call.q[state.rows],
            (k, v),
            q_scale=call.sm_scale,
            out=dense_out,
            lse=dense_lse,
            return_lse=lse is not None,
        )
        _store(out, dense_out, state, 0.0)
        if lse is not None and dense_lse is not None:
            if call.lse_base == "e":
                dense_lse.mul_(math.log(2.0))
            _store(lse, dense_lse, state, -math.inf)


def _store(target: Tensor, result: Tensor, state: FlashInferPlan, empty: float) -> None:
    """Move a result to its place: `empty` for rows that see no key, nothing for padding."""
    shape = (-1, *(1 for _ in target.shape[1:]))
    if state.live is not None:
        assert state.dead is not None
        target.masked_fill_(state.dead.view(shape), empty)
        torch.where(state.live.view(shape), result, target, out=target)
        return
    if state.dead is not None:
        result.masked_fill_(state.dead.view(shape), empty)
    if result is not target:
        target.copy_(result)


def _kernel_refusal(kernel: str, spec: AttentionSpec) -> str | None:
    """Return why a kernel that was asked for by name cannot take the call, or None."""
    if kernel in ("decode", "tc", "xqa") and spec.max_q_len > 1:
        return f"flashinfer:{kernel} takes one query token a request: say so with max_q_len=1"
    if kernel == "decode" and spec.group_size not in DECODE_GROUP_SIZES:
        return f"flashinfer:decode takes group sizes {DECODE_GROUP_SIZES}, got {spec.group_size}"
    if kernel == "xqa" and spec.page_size not in XQA_PAGE_SIZES:
        return f"flashinfer:xqa takes page sizes {XQA_PAGE_SIZES}, got {spec.page_size}"
    if kernel == "fa3" and not _is_hopper(spec.device):
        return "flashinfer:fa3 needs compute capability 9"
    return None


def _kernel_for(spec: AttentionSpec, min_q_len: int, max_q_len: int, kernel: str) -> str:
    """Return the kernel asked for, or that which was fastest in `perf/results/peers-h200`."""
    if kernel != "auto":
        return kernel
    if max_q_len == 1:
        return "decode" if spec.group_size == 1 else "tc"
    return "fa3" if min_q_len >= FA3_MIN_Q_LEN and _is_hopper(spec.device) else "fa2"


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


BACKEND = FlashInferBackend()


@functools.cache
def with_kernel(kernel: str) -> FlashInferBackend:
    """Return the backend that always takes one kernel."""
    return FlashInferBackend(kernel)
