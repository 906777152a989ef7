"""FlashInfer as a backend: the peer to compare with. Imported here only, and only when asked for.

Its planner runs on the host, so `plan` synchronizes and cannot be captured in a CUDA graph. What it
gets wrong is avoided where possible: requests without queries are left out, tables are rebuilt from
the lengths, rows that see no key are repaired. What is left: NaN in unread slots of a last page
reaches the output, and logits below -5e4 (log2) count as masked.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonattn.backends import (
    AttentionCall,
    UnsupportedError,
    Workspace,
    WorkspaceBytes,
    missing_features,
)
from tritonattn.layout import PageTable
from tritonattn.spec import AttentionSpec
from tritonattn.staging import is_capturing

# Others compile, and are wrong or refused: FlashInfer's tiles are whole multiples of 64.
HEAD_DIMS = (64, 128, 256)
# Of its decode kernel without tensor cores.
DECODE_GROUP_SIZES = (1, 2, 3, 4, 8)
VERSIONS = ("0.6.", "0.7.")
TESTED = "0.6.13"
# What is called by keyword, looked for in other versions before they are trusted.
_PLANNED = {"q_data_type", "kv_data_type", "sm_scale"}
_RUN = {"q_scale", "out", "lse", "return_lse"}
_CALLED = {
    "BatchDecodeWithPagedKVCacheWrapper.plan": _PLANNED,
    "BatchDecodeWithPagedKVCacheWrapper.run": _RUN,
    "BatchPrefillWithPagedKVCacheWrapper.plan": _PLANNED | {"causal"},
    "BatchPrefillWithPagedKVCacheWrapper.run": _RUN,
}
WORKSPACE_BYTES = 384 * 1024 * 1024


# Shorter queries leave most of fa3's tile empty: fa2 is the faster one there.
FA3_MIN_Q_LEN = 64
XQA_PAGE_SIZES = (16, 32, 64, 128)
XQA_WORKSPACE_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """A planned FlashInfer wrapper and the rows of q that it is for."""

    wrapper: Any
    rows: slice  # of q and out: those that belong to requests
    dead: Tensor | None  # [n] int64, device: which of these rows see no key


class FlashInferBackend:
    """One of FlashInfer's kernels, or the one that suits the lengths of a step.

    `decode` (CUDA cores), `tc` (decode on tensor cores), `fa2`, `fa3`: its wrappers; `xqa`: decode
    through `trtllm_batch_decode_with_kv_cache`, which has no LSE.
    """

    caveat = (
        "; plans on the host, so it synchronizes and a CUDA graph keeps one plan; NaN in unused "
        "slots of a last page reaches the output"
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

    def workspace_bytes(self, spec: AttentionSpec) -> WorkspaceBytes:
        """Return 0: FlashInfer gets a workspace of its own."""
        return WorkspaceBytes(0, 0)

    def plan(
        self, spec: AttentionSpec, table: PageTable, qo_indptr: Tensor, workspace: Workspace
    ) -> FlashInferPlan | None:
        """Plan FlashInfer's wrapper for the requests that have queries; None if there are none."""
        if is_capturing(spec.device):
            raise UnsupportedError(
                "the flashinfer backend plans on the host and cannot do so in a CUDA graph capture"
            )
        begins, q_lens = _rows(qo_indptr, spec.total_q)
        live = (q_lens > 0).nonzero().flatten()
        if not live.numel():
            return None
        q_lens, kv_lens = q_lens[live], table.kv_lens().cpu()[live]
        first = int(begins[live[0]])
        starts = _starts(q_lens)
        kernel = _kernel_for(spec, q_lens) if self.kernel == "auto" else self.kernel
        if kernel == "xqa":
            wrapper: Any = _Xqa(spec, table, live, kv_lens)
        else:
            wrapper = _plan_wrapper(kernel, spec, starts, _csr(table, live, kv_lens))
        # Of a causal request with more queries than keys the first queries stand before all keys.
        hidden = (q_lens - kv_lens).clamp(min=0) if spec.causal else q_lens * (kv_lens == 0)
        dead = _ranges(starts[:-1], hidden)
        return FlashInferPlan(
            wrapper,
            slice(first, first + int(starts[-1])),
            dead.to(spec.device) if dead.numel() else None,
        )

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
        # FlashInfer writes packed rows; `contiguous` returns a packed tensor itself.
        dense_out = out.contiguous()
        dense_lse = None if lse is None else lse.contiguous()
        # It was planned with sm_scale 1; q_scale multiplies that.
        state.wrapper.run(
            call.q[state.rows],
            (k, v),
            q_scale=call.sm_scale,
            out=dense_out,
            lse=dense_lse,
            return_lse=lse is not None,
        )
        if state.dead is not None:
            dense_out.index_fill_(0, state.dead, 0.0)
        if dense_out is not out:
            out.copy_(dense_out)
        if lse is not None and dense_lse is not None:
            if call.lse_base == "e":
                dense_lse.mul_(math.log(2.0))
            if state.dead is not None:
                dense_lse.index_fill_(0, state.dead, -math.inf)
            if dense_lse is not lse:
                lse.copy_(dense_lse)


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


def _kernel_for(spec: AttentionSpec, q_lens: Tensor) -> str:
    """Return the kernel that was fastest for such lengths in `perf/results/peers-h200`."""
    if int(q_lens.max()) == 1:
        return "decode" if spec.group_size == 1 else "tc"
    return "fa3" if int(q_lens.min()) >= FA3_MIN_Q_LEN and _is_hopper(spec.device) else "fa2"


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def import_problem() -> str | None:
    """Return why FlashInfer cannot be used in this process, or None."""
    try:
        module = importlib.import_module("flashinfer")
    except Exception as error:  # a broken installation fails in many ways
        return (
            f"flashinfer-python cannot be imported ({type(error).__name__}: {error}); "
            "pip install 'tritonattn[flashinfer]'"
        )
    version = str(getattr(module, "__version__", "of unknown number"))
    if not version.startswith(VERSIONS):
        return f"flashinfer-python must be {' or '.join(v + 'x' for v in VERSIONS)}, got {version}"
    return None if version.startswith(TESTED) else _signature_problem(module, version)


def _signature_problem(module: Any, version: str) -> str | None:
    """Return what a version that was not tested lacks of what is called here, or None."""
    for path, names in _CALLED.items():
        called = module
        for part in path.split("."):
            called = getattr(called, part, None)
        if called is None:
            return f"flashinfer-python {version} has no {path}, which {TESTED} has"
        parameters = inspect.signature(called).parameters
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            continue
        missing = sorted(names - set(parameters))
        if missing:
            return f"{path} of flashinfer-python {version} has no {', '.join(missing)}"
    return None


def _plan_wrapper(
    kernel: str, spec: AttentionSpec, starts: Tensor, table: tuple[Tensor, Tensor, Tensor]
) -> Any:
    flashinfer = importlib.import_module("flashinfer")
    heads = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim_qk, spec.page_size)
    options = {"q_data_type": spec.q_dtype, "kv_data_type": spec.kv_dtype, "sm_scale": 1.0}
    workspace = _workspace(spec.device)
    if kernel in ("decode", "tc"):
        if int(starts[-1]) != starts.numel() - 1:
            raise UnsupportedError(f"flashinfer:{kernel} takes one query token a request")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=kernel == "tc"
        )
        wrapper.plan(*table, *heads, **options)
        return wrapper
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernel)
    wrapper.plan(starts, *table, *heads, causal=spec.causal, **options)
    return wrapper


class _Xqa:
    """XQA as a wrapper: the table and the lengths of the requests that have queries."""

    def __init__(
        self, spec: AttentionSpec, table: PageTable, live: Tensor, kv_lens: Tensor
    ) -> None:
        indptr, indices, _ = _csr(table, live, kv_lens)
        pages = (indptr[1:] - indptr[:-1]).long()
        width = max(int(pages.max()), 1)
        # Contiguous: a slice of columns would be read with wrong strides.
        self.block_table = torch.zeros(len(pages), width, dtype=torch.int32, device=spec.device)
        used = torch.arange(width) < pages[:, None]
        self.block_table[used.to(spec.device)] = indices
        self.seq_lens = kv_lens.int().to(spec.device)
        self.max_kv_len = width * spec.page_size
        self.workspace = _xqa_workspace(spec.device)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        q_scale: float,
        out: Tensor,
        lse: Tensor | None,
        return_lse: bool,
    ) -> None:
        if return_lse:
            raise UnsupportedError("flashinfer:xqa gives no LSE: take another backend for it")
        flashinfer = importlib.import_module("flashinfer")
        flashinfer.decode.trtllm_batch_decode_with_kv_cache(
            q.contiguous(), paged_kv_cache, self.workspace, self.block_table, self.seq_lens,
            self.max_kv_len, bmm1_scale=q_scale, bmm2_scale=1.0, out=out, kv_layout="NHD",
            backend="xqa", q_len_per_req=1,
        )  # fmt: skip


@functools.cache
def _xqa_workspace(device: torch.device) -> Tensor:
    # Zeroed once and shared with no other kernel: its semaphores reset themselves.
    return torch.zeros(XQA_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _rows(qo_indptr: Tensor, total_q: int) -> tuple[Tensor, Tensor]:
    """Return the first row and the number of rows of each request, clamped to q, on the host."""
    ends = qo_indptr.long().cpu().clamp(0, total_q)
    return ends[:-1], (ends[1:] - ends[:-1]).clamp(min=0)


def _csr(table: PageTable, live: Tensor, kv_lens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return indptr, indices and last_page_len of some requests, with just the pages they need."""
    pages = (kv_lens + table.page_size - 1) // table.page_size
    request = live.repeat_interleave(pages).to(table.device)
    column = _ranges(torch.zeros_like(pages), pages).to(table.device)
    if table.indptr is None:
        indices = table.page_ids[request, column]
    else:
        indices = table.page_ids[table.indptr.long().clamp(min=0)[request] + column]
    last_page_len = torch.where(pages > 0, kv_lens - (pages - 1) * table.page_size, 0)
    return _starts(pages), indices, last_page_len.int()


def _starts(counts: Tensor) -> Tensor:
    """Return the exclusive prefix sums and their total, int32."""
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()


def _ranges(begins: Tensor, counts: Tensor) -> Tensor:
    """Return the concatenation of `begin, begin + 1, ...` of each count, int64."""
    counts = counts.long()
    offsets = begins.long() - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + offsets.repeat_interleave(counts)


BACKEND = FlashInferBackend()


@functools.cache
def with_kernel(kernel: str) -> FlashInferBackend:
    """Return the backend that always takes one kernel."""
    return FlashInferBackend(kernel)
