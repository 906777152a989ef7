"""FlashInfer's wrappers, planned for a step: anew for an eager one, in place for a CUDA graph.

They take CSR tables on the host, of the requests that matter and of just the pages that these need.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonattn.backends import UnsupportedError, Workspace
from tritonattn.layout import PageTable
from tritonattn.spec import AttentionSpec
from tritonattn.staging import pinned

WORKSPACE_BYTES = 384 * 1024 * 1024
XQA_WORKSPACE_BYTES = 32 * 1024 * 1024


class Pages(NamedTuple):
    """A CSR table as FlashInfer's planners take it."""

    indptr: Tensor  # [n + 1] int32, host
    indices: Tensor  # [num_pages] int32, device
    last_page_len: Tensor  # [n] int32, host


class QueryRows(NamedTuple):
    """Where the queries of each request lie, on the host."""

    begins: Tensor  # [batch] int64
    lengths: Tensor  # [batch] int64


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """A planned wrapper and the rows of q that it is for."""

    wrapper: Any
    rows: slice  # of q and out
    dead: Tensor | None  # [n] bool, device: which of these rows see no key
    padding: Tensor | None = None  # [n] bool, device: which of them belong to no request


class FlashInferGraphPlan:
    """A decode wrapper for a CUDA graph to hold, planned anew in place before each replay.

    To the wrapper each row of q is a request, of no pages where the row belongs to none: so their
    number stays what it was at the capture. Wrappers of one workspace share the buffers of their
    tables, as one step is in flight at a time.
    """

    def __init__(
        self,
        kernel: str,
        spec: AttentionSpec,
        table: PageTable,
        qo_indptr: Tensor,
        workspace: Workspace,
    ) -> None:
        rows = spec.total_q
        self._spec, self._table, self._qo_indptr = spec, table, qo_indptr
        width = max(1, -(-spec.max_kv_len // spec.page_size))
        if kernel == "xqa":
            self._wrapper: Any = Xqa(spec, rows, width, workspace.kept)
        else:
            self._wrapper = _graph_wrapper(kernel, spec, rows, width, workspace.kept)
        self._dead, self._padding = torch.zeros(2, rows, dtype=torch.bool, device=spec.device)
        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.replan()

    @property
    def state(self) -> FlashInferPlan:
        """Return what `run` is captured with."""
        rows = slice(0, self._spec.total_q)
        return FlashInferPlan(self._wrapper, rows, self._dead, self._padding)

    def replan(self) -> None:
        """Plan for the metadata that stands on the device now; synchronizes."""
        # The plan before may still be on its way from the wrapper's pinned memory.
        self._planned.synchronize()
        begins, lengths = query_rows(self._qo_indptr, self._spec.total_q)
        if int(lengths.max()) > 1:
            raise UnsupportedError("FlashInfer's decode kernels take one query token a request")
        owned = (lengths > 0).nonzero().flatten()
        owner = torch.full((self._spec.total_q,), -1)
        owner[begins[owned]] = owned
        padding = owner < 0
        kv_lens = torch.where(padding, 0, self._table.kv_lens().cpu()[owner])
        plan_decode(self._wrapper, self._spec, pages_of(self._table, owner.clamp(min=0), kv_lens))
        self._dead.copy_(pinned(kv_lens == 0), non_blocking=True)
        self._padding.copy_(pinned(padding), non_blocking=True)
        self._planned.record()


class Xqa:
    """XQA, `trtllm_batch_decode_with_kv_cache`, as a decode wrapper; it has no LSE."""

    def __init__(self, spec: AttentionSpec, rows: int, width: int, kept: dict[str, Any]) -> None:
        # Contiguous: a slice of columns would be read with wrong strides.
        self.block_table = torch.zeros(rows, width, dtype=torch.int32, device=spec.device)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=spec.device)
        self.page_size = spec.page_size
        # Shared with no other kernel: its semaphores reset themselves.
        self.workspace = _memory(kept, "xqa", XQA_WORKSPACE_BYTES, spec.device)

    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> None:
        """Write the table and the lengths in place."""
        pages = (indptr[1:] - indptr[:-1]).long()
        kv_lens = torch.where(pages > 0, (pages - 1) * self.page_size + last_page_len, 0).int()
        used = torch.arange(self.block_table.size(1)) < pages[:, None]
        device = self.block_table.device
        self.block_table[used.to(device)] = indices
        self.seq_lens.copy_(pinned(kv_lens), non_blocking=True)

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
        """Attend like a wrapper."""
        if return_lse:
            raise UnsupportedError("flashinfer:xqa gives no LSE: take another backend for it")
        flashinfer = importlib.import_module("flashinfer")
        flashinfer.decode.trtllm_batch_decode_with_kv_cache(
            q.contiguous(), paged_kv_cache, self.workspace, self.block_table, self.seq_lens,
            self.block_table.size(1) * self.page_size, bmm1_scale=q_scale, bmm2_scale=1.0, out=out,
            kv_layout="NHD", backend="xqa", q_len_per_req=1,
        )  # fmt: skip


def planned_wrapper(
    kernel: str, spec: AttentionSpec, starts: Tensor, pages: Pages, workspace: Workspace
) -> Any:
    """Return a wrapper that is planned for some requests.

    Parameters
    ----------
    kernel : {"decode", "tc", "fa2", "fa3", "xqa"}
    starts : Tensor, shape [n + 1], int32, host
        First row of each request.
    """
    flashinfer = importlib.import_module("flashinfer")
    # A stage's memory is the stage's; other calls share what their stream has.
    kept = workspace.kept if workspace.step is not None else _of_stream(*_stream(spec.device))
    if kernel in ("fa2", "fa3"):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            _memory(kept, "flashinfer", WORKSPACE_BYTES, spec.device), "NHD", backend=kernel
        )
        wrapper.plan(starts, *pages, *_heads(spec), causal=spec.causal, **_options(spec))
        return wrapper
    if int(starts[-1]) != starts.numel() - 1:
        raise UnsupportedError(f"flashinfer:{kernel} takes one query token a request")
    if kernel == "xqa":
        most = (pages.indptr[1:] - pages.indptr[:-1]).max()
        wrapper = Xqa(spec, starts.numel() - 1, max(int(most), 1), kept)
    else:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _memory(kept, "flashinfer", WORKSPACE_BYTES, spec.device),
            "NHD",
            use_tensor_cores=kernel == "tc",
        )
    plan_decode(wrapper, spec, pages)
    return wrapper


def plan_decode(wrapper: Any, spec: AttentionSpec, pages: Pages) -> None:
    """Plan a decode wrapper, or XQA."""
    if isinstance(wrapper, Xqa):
        wrapper.plan(*pages)
    else:
        wrapper.plan(*pages, *_heads(spec), **_options(spec))


def query_rows(qo_indptr: Tensor, total_q: int) -> QueryRows:
    """Return where the queries of each request lie, clamped to q; synchronizes."""
    ends = qo_indptr.long().cpu().clamp(0, total_q)
    return QueryRows(ends[:-1], (ends[1:] - ends[:-1]).clamp(min=0))


def pages_of(table: PageTable, requests: Tensor, kv_lens: Tensor) -> Pages:
    """Return the pages that some requests need.

    Parameters
    ----------
    requests, kv_lens : Tensor, shape [n], int64, host
        Indices of the requests, and their lengths in tokens.
    """
    pages = (kv_lens + table.page_size - 1) // table.page_size
    request = requests.repeat_interleave(pages).to(table.device)
    column = _ranges(torch.zeros_like(pages), pages).to(table.device)
    if table.indptr is None:
        indices = table.page_ids[request, column]
    else:
        indices = table.page_ids[table.indptr.long().clamp(min=0)[request] + column]
    last_page_len = torch.where(pages > 0, kv_lens - (pages - 1) * table.page_size, 0)
    return Pages(starts_of(pages), indices, last_page_len.int())


def starts_of(counts: Tensor) -> Tensor:
    """Return the exclusive prefix sums and their total, int32."""
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()


def mask_of(begins: Tensor, counts: Tensor, total: int) -> Tensor:
    """Return which of `total` rows lie in one of the ranges of `count` rows from `begin` on."""
    mask = torch.zeros(total, dtype=torch.bool)
    mask[_ranges(begins, counts)] = True
    return mask


def _graph_wrapper(
    kernel: str, spec: AttentionSpec, rows: int, width: int, kept: dict[str, Any]
) -> Any:
    flashinfer = importlib.import_module("flashinfer")
    indptr, indices, last_page_len = (
        _memory(kept, f"flashinfer {name}", 4 * entries, spec.device).view(torch.int32)[:entries]
        for name, entries in (("indptr", rows + 1), ("indices", rows * width), ("last", rows))
    )
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _memory(kept, "flashinfer", WORKSPACE_BYTES, spec.device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=kernel == "tc",
        paged_kv_indptr_buffer=indptr,
        paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=last_page_len,
    )


def _memory(kept: dict[str, Any], name: str, size: int, device: torch.device) -> Tensor:
    """Return zeroed memory that stays; what was given out before is neither moved nor shrunk."""
    have: Tensor | None = kept.get(name)
    if have is None or have.numel() < size:
        have = kept[name] = torch.zeros(size, dtype=torch.uint8, device=device)
    return have


def _stream(device: torch.device) -> tuple[torch.device, int]:
    if device.type != "cuda":
        return device, 0
    return device, torch.cuda.current_stream(device).cuda_stream


@functools.cache
def _of_stream(device: torch.device, stream: int) -> dict[str, Any]:
    return {}


def _heads(spec: AttentionSpec) -> tuple[int, int, int, int]:
    return spec.num_qo_heads, spec.num_kv_heads, spec.head_dim_qk, spec.page_size


def _options(spec: AttentionSpec) -> dict[str, Any]:
    # `run` scales: its q_scale multiplies sm_scale.
    return {"q_data_type": spec.q_dtype, "kv_data_type": spec.kv_dtype, "sm_scale": 1.0}


def _ranges(begins: Tensor, counts: Tensor) -> Tensor:
    """Return the concatenation of `begin, begin + 1, ...` of each count, int64."""
    counts = counts.long()
    offsets = begins.long() - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + offsets.repeat_interleave(counts)
