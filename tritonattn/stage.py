"""A stage of a pipeline: memory of fixed size and addresses, which CUDA graphs rely on.

A stage has two parts. Its *workspace* is what the kernels ask for: work lists of the step in
flight, and partial states. Its *metadata* is an optional home for the tensors that describe a step:
`update` copies them there in place, padded up to the stage's capacity, and `metadata` returns views
for a batch size. No address changes and nothing shrinks, so a graph captured for one batch size
replays after any step on that stage.

Rule: one stage has one step in flight, in stream order. Micro-batches that overlap, and groups of
layers whose plans differ (causal or not, another window), need a stage each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritonattn import checks, graph_step, graphs
from tritonattn.backends import NAMES, Workspace, WorkspaceBytes, get_backend
from tritonattn.implementations import implementation
from tritonattn.spec import AttentionSpec, check_dtypes, check_head_dim, check_heads
from tritonattn.staging import check_place, is_capturing, to_device

if TYPE_CHECKING:
    from tritonattn.graphs import StageGraphs

_ALIGNMENT = 256  # bytes
_NUMBERS = (
    "max_batch_size", "max_num_tokens", "max_pages_per_request", "num_qo_heads", "num_kv_heads",
    "head_dim", "page_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StageCapacity:
    """The largest step that a stage holds, and the geometry of its layers."""

    max_batch_size: int  # requests
    max_num_tokens: int  # rows of q
    max_pages_per_request: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens
    dtype: torch.dtype  # of q and of the cache

    def __post_init__(self) -> None:
        """Refuse what no stage can be."""
        for name in _NUMBERS:
            value = checks.as_bound(name, getattr(self, name))
            if not value:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.max_batch_size * self.max_pages_per_request >= 2**31:
            raise ValueError(
                "max_batch_size * max_pages_per_request must be below 2**31, got "
                f"{self.max_batch_size} * {self.max_pages_per_request}"
            )
        check_heads(self.num_qo_heads, self.num_kv_heads)
        check_head_dim("head_dim", self.head_dim)
        check_dtypes(self.dtype, self.dtype)

    def spec(self, device: torch.device) -> AttentionSpec:
        """Return the largest call."""
        return AttentionSpec(
            device=device,
            q_dtype=self.dtype,
            kv_dtype=self.dtype,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim,
            head_dim_vo=self.head_dim,
            page_size=self.page_size,
            batch_size=self.max_batch_size,
            total_q=self.max_num_tokens,
            max_q_len=self.max_num_tokens,
            max_kv_len=self.max_pages_per_request * self.page_size,
            is_csr=False,
            causal=True,
        )

    def metadata_entries(self) -> tuple[int, int, int]:
        """Return the int32 entries of qo_indptr, seq_lens and block_table."""
        batch = self.max_batch_size
        return batch + 1, batch, batch * self.max_pages_per_request


class StageBuffers:
    """The memory of one stage; what a call takes as `buffers=`. Made by `PipelineBuffers`."""

    def __init__(self, index: int, capacity: StageCapacity, memory: Tensor) -> None:
        self.index = index
        self.capacity = capacity
        self.device = memory.device
        sizes = part_bytes(capacity, memory.device)
        step, call, *metadata = (
            part[:size]
            for part, size in zip(
                torch.split(memory, [aligned(size) for size in sizes]), sizes, strict=True
            )
        )
        self.workspace = Workspace(step, call)
        self.qo_indptr, self.seq_lens, table = (part.view(torch.int32) for part in metadata)
        self.block_table = table.view(capacity.max_batch_size, capacity.max_pages_per_request)
        self._owner: weakref.ref[Any] | None = None

    def __repr__(self) -> str:
        """Return the index and the capacity."""
        return f"StageBuffers(index={self.index}, {self.capacity})"

    def metadata(self, batch_size: int | None = None) -> dict[str, Tensor]:
        """Return views of the stage's metadata, as `plan_attention` takes them.

        Parameters
        ----------
        batch_size : int, optional
            Requests; the capacity by default. Requests past the step's are empty.

        Returns
        -------
        dict
            `qo_indptr` [batch + 1], `seq_lens` [batch], `block_table` [batch, max pages]; int32.
        """
        batch_size = self.capacity.max_batch_size if batch_size is None else batch_size
        self._check_batch_size(batch_size)
        return {
            "qo_indptr": self.qo_indptr[: batch_size + 1],
            "seq_lens": self.seq_lens[:batch_size],
            "block_table": self.block_table[:batch_size],
        }

    def update(
        self,
        *,
        qo_indptr: Tensor,
        seq_lens: Tensor,
        block_table: Tensor | None = None,
        indptr: Tensor | None = None,
        indices: Tensor | None = None,
        max_kv_len: int | None = None,
    ) -> None:
        """Copy a step's metadata into the stage, padded up to its capacity; waits for nothing.

        Parameters
        ----------
        qo_indptr : Tensor, shape [batch + 1], int32
        seq_lens : Tensor, shape [batch], int32
        block_table : Tensor, shape [batch, width], int32
        indptr, indices : Tensor, shape [batch + 1] and [num_entries], int32
            A CSR table instead; it becomes a dense one.
        max_kv_len : int, optional
            0 says that a table without columns, or `indices` without entries, is meant.

        Notes
        -----
        Each tensor is on the stage's device or on the host, pinned or not. Those on the host are
        copied before the call returns, into pinned memory that is not used again before its
        transfer is over: they may be rewritten at once. Requests past the batch get no query tokens
        and no keys, entries past a row -1; a length beyond its row is clamped to it. A plan that
        was made from the step before can no longer be used. Asynchronous, on the current stream.

        Raises
        ------
        ValueError, TypeError
            Before anything is written: over capacity, with what is needed and what there is;
            tensors that do not belong together; host tensors inside a CUDA graph capture.
        """
        given = {"qo_indptr": qo_indptr, "seq_lens": seq_lens}
        table = {"block_table": block_table, "indptr": indptr, "indices": indices}
        given |= {name: tensor for name, tensor in table.items() if tensor is not None}
        for name, tensor in given.items():
            check_place(name, tensor, self.device, ndim=2 if name == "block_table" else 1)
            if tensor.untyped_storage().data_ptr() == self.block_table.untyped_storage().data_ptr():
                raise ValueError(f"{name} lies in the buffers themselves: write there, or clone it")
        self._check_values(qo_indptr, seq_lens)
        moved = dict(zip(given, to_device(list(given.values()), self.device), strict=True))
        starts = moved.pop("qo_indptr")
        page_table = checks.make_page_table(
            moved["seq_lens"],
            moved.get("block_table"),
            moved.get("indptr"),
            moved.get("indices"),
            self.capacity.page_size,
        )
        checks.check_qo_indptr(starts, page_table)
        checks.check_has_pages(page_table, page_table.batch_size, max_kv_len)
        self._check_batch_size(page_table.batch_size)
        if not page_table.is_csr:
            self._check_pages("block_table has", page_table.width, "columns")
        if not is_capturing(self.device):
            self._owner = None
        step = graph_step.current()
        if step is not None:
            step.metadata_is_written()
        implementation("stage_metadata", self.device).stage_metadata(
            starts, page_table, self.qo_indptr, self.seq_lens, self.block_table
        )

    def capture(
        self, batch_sizes: Iterable[int], step: Callable[[int], Any], *, pool: Any = None
    ) -> StageGraphs:
        """Capture a step in a CUDA graph for each batch size.

        Parameters
        ----------
        batch_sizes : iterable of int
            In any order; the largest is captured first, and all share one pool of memory.
        step : callable
            `step(batch_size)` launches the work of a step: `plan_attention(**stage.metadata(
            batch_size), buffers=stage)` and the layers. Called once for each size to compile what
            it needs, on a stream of its own, then inside the capture. FlashInfer, which plans on
            the host, is planned outside the capture and again before each replay: once a step, for
            metadata that the step does not write itself. Its memory is taken before the captures.
        pool : optional
            Of an earlier capture, to share its memory.

        Returns
        -------
        StageGraphs
            `replay(batch_size)`, and the memory that each size took.

        Raises
        ------
        ValueError
            For a stage on the CPU, a size over capacity, or inside another capture.
        """
        return graphs.capture(self, batch_sizes, step, pool)

    def check(self, spec: AttentionSpec) -> None:
        """Raise `ValueError` unless a call fits into the stage."""
        largest = self.capacity.spec(self.device)
        for name, argument in _GEOMETRY.items():
            if getattr(spec, name) != getattr(largest, name):
                raise ValueError(
                    f"buffers are for {argument} {getattr(largest, name)}, the call has "
                    f"{getattr(spec, name)}"
                )
        self._check_batch_size(spec.batch_size)
        if spec.total_q > self.capacity.max_num_tokens:
            raise ValueError(
                f"q has {spec.total_q} rows, the buffers hold max_num_tokens = "
                f"{self.capacity.max_num_tokens}"
            )

    def claim(self, owner: object) -> Workspace:
        """Give the workspace to a plan, which takes it from the one before."""
        self._owner = weakref.ref(owner)
        return self.workspace

    def check_owner(self, owner: object) -> None:
        """Raise `ValueError` if another plan has taken the workspace."""
        if self._owner is None or self._owner() is not owner:
            raise ValueError(
                f"stage {self.index} was planned anew or updated since this plan was made: one "
                "stage has one step in flight; layers that need plans of their own need stages of "
                "their own"
            )

    def _check_values(self, qo_indptr: Tensor, seq_lens: Tensor) -> None:
        """Check what the host can see without waiting for the device."""
        if qo_indptr.device.type == "cpu" and qo_indptr.numel():
            ends = qo_indptr.tolist()
            if ends[0] < 0 or any(end < begin for begin, end in pairwise(ends)):
                raise ValueError(f"qo_indptr must not decrease nor start below 0, got {ends}")
            if ends[-1] > self.capacity.max_num_tokens:
                raise ValueError(
                    f"the step has {ends[-1]} query tokens, the stage holds max_num_tokens = "
                    f"{self.capacity.max_num_tokens}"
                )
        if seq_lens.device.type == "cpu" and seq_lens.numel():
            pages = -(-int(seq_lens.max()) // self.capacity.page_size)
            self._check_pages("a request needs", pages, "pages")

    def _check_pages(self, what: str, pages: int, unit: str) -> None:
        if pages > self.capacity.max_pages_per_request:
            raise ValueError(
                f"{what} {pages} {unit}, the stage holds max_pages_per_request = "
                f"{self.capacity.max_pages_per_request}"
            )

    def _check_batch_size(self, batch_size: int) -> None:
        if not 0 <= batch_size <= self.capacity.max_batch_size:
            raise ValueError(
                f"the batch has {batch_size} requests, the stage holds max_batch_size = "
                f"{self.capacity.max_batch_size}"
            )


def check_stage(buffers: object) -> None:
    """Raise `TypeError` unless `buffers` is what a call takes."""
    if buffers is not None and not isinstance(buffers, StageBuffers):
        raise TypeError(
            "buffers must be a stage, PipelineBuffers.allocate(...).stage(i), got "
            f"{type(buffers).__name__}"
        )


# What a call must have in common with the buffers: field of the spec -> the argument's name.
_GEOMETRY = {
    "device": "device",
    "q_dtype": "dtype",
    "kv_dtype": "dtype",
    "num_qo_heads": "num_qo_heads",
    "num_kv_heads": "num_kv_heads",
    "head_dim_qk": "head_dim",
    "head_dim_vo": "head_dim",
    "page_size": "page_size",
}


def part_bytes(capacity: StageCapacity, device: torch.device) -> list[int]:
    """Return the sizes of the parts of a stage: workspace, then metadata."""
    spec = capacity.spec(device)
    needed = [get_backend(name).workspace_bytes(spec) for name in NAMES]
    workspace = WorkspaceBytes(*(max(sizes) for sizes in zip(*needed, strict=True)))
    return [*workspace, *(4 * entries for entries in capacity.metadata_entries())]


def aligned(size: int) -> int:
    """Return the room that a part takes, in bytes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
