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
from tritonattn.kernels._config import chip
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
    # [n] bool, device: which of them see keys; the others that are not dead belong to no request.
    # None: there are no others.
    live: Tensor | None = None


class FlashInferGraphPlan:
    """A decode wrapper for a CUDA graph to hold, planned anew in place before each replay.

    To the wrapper each row of q is a request: so their number stays what it was at the capture. A
    row that has no keys, or belongs to no request, gets one page, whose result is not kept: the
    planner of the kernel without tensor cores would count no work for none, but list some, and drop
    as much of what comes after. Wrappers of one workspace share the buffers of their tables, as one
    step is in flight at a time.

    The first plan is for padding alone: nothing is known yet of the steps to come.
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
        self._dead, self._live = torch.zeros(2, rows, dtype=torch.bool, device=spec.device)
        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._plan(torch.full((rows,), -1), torch.zeros(rows, dtype=torch.int64))

    @property
    def state(self) -> FlashInferPlan:
        """Return what `run` is captured with."""
        rows = slice(0, self._spec.total_q)
        return FlashInferPlan(self._wrapper, rows, self._dead, self._live)

    def replan(self) -> None:
        """Plan for the metadata that stands on the device now; synchronizes."""
        begins, lengths = query_rows(self._qo_indptr, self._spec.total_q)
        longest = int(lengths.max())
        if longest > 1:
            raise UnsupportedError(
                f"the graph was captured for max_q_len=1, a request has {longest} query tokens"
            )
        owned = (lengths > 0).nonzero().flatten()
        owner = torch.full((self._spec.total_q,), -1)
        owner[begins[owned]] = owned
        self._plan(owner, torch.where(owner < 0, 0, self._table.kv_lens().cpu()[owner]))

    def _plan(self, owner: Tensor, kv_lens: Tensor) -> None:
        """Plan for the request that each row belongs to, -1 if to none, and its keys."""
        # The plan before may still be on its way from the wrapper's pinned memory.
        self._planned.synchronize()
        pages = pages_of(self._table, owner.clamp(min=0), kv_lens)
        plan_decode(self._wrapper, self._spec, _with_a_page_each(pages))
        self._dead.copy_(pinned((owner >= 0) & (kv_lens == 0)), non_blocking=True)
        self._live.copy_(pinned(kv_lens > 0), non_blocking=True)
        if self._spec.device.type == "cuda":
            self._planned.record(torch.cuda.current_stream(self._spec.device))


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


def _with_a_page_each(pages: Pages) -> Pages:
    """Give a token of page 0 to those without pages."""
    counts = pages.indptr[1:] - pages.indptr[:-1]
    starts = starts_of(counts.clamp(min=1))
    indices = pages.indices.new_zeros(int(starts[-1]))
    indices[_ranges(starts[:-1], counts).to(indices.device)] = pages.indices
    return Pages(starts, indices, torch.where(counts > 0, pages.last_page_len, 1).int())


def _graph_wrapper(
    kernel: str, spec: AttentionSpec, rows: int, width: int, kept: dict[str, Any]
) -> Any:
    flashinfer = importlib.import_module("flashinfer")
    # The width of a CSR table is that of all its rows together.
    entries = width + rows if spec.is_csr else rows * width
    indptr, indices, last_page_len = (
        _memory(kept, f"flashinfer {name}", 4 * size, spec.device).view(torch.int32)[:size]
        for name, size in (("indptr", rows + 1), ("indices", entries), ("last", rows))
    )
    size = max(WORKSPACE_BYTES, _partials_bytes(spec)) if kernel == "tc" else WORKSPACE_BYTES
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _memory(kept, "flashinfer", size, spec.device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=kernel == "tc",
        paged_kv_indptr_buffer=indptr,
        paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=last_page_len,
    )


def _partials_bytes(spec: AttentionSpec) -> int:
    """Return what the tensor-core kernel's partial states take in a graph, where it always splits.

    As `PrefillPlan` in FlashInfer's scheduler.cuh bounds them: tiles of 16, 64 or 128 rows, as many
    as two programs a multiprocessor make, or as the rows of q do.
    """
    group, batch = spec.group_size, spec.total_q
    tile = 16 if group <= 16 else 64 if group <= 64 or spec.head_dim_qk >= 256 else 128
    programs = 2 * chip(spec.device).num_sms // spec.num_kv_heads
    tiles = max(programs, -(-batch * group // tile) + batch - 1)
    return 4 * spec.num_qo_heads * tiles * tile * (spec.head_dim_vo + 1)


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
