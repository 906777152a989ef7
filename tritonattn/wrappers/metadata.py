"""Metadata of one step as FlashInfer's wrappers take it: CSR tables on the host or on the device.

Values on the host are checked before anything is written; values on the device only under
`TRITONATTN_VALIDATE=1`. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tritonattn.layout import check_index_tensor
from tritonattn.staging import check_place, cut, is_capturing, stage, values_are_checked


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """What `plan()` is given; each tensor on the host or on the wrapper's device."""

    indptr: Tensor  # [batch + 1] int32
    indices: Tensor  # [num_entries] int32
    last_page_len: Tensor  # [batch] int32
    qo_indptr: Tensor | None = None  # [batch + 1] int32; None: equally many rows each
    prefix: str = ""  # of the first three arguments' names

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return self.last_page_len.numel()

    def named(self) -> dict[str, Tensor]:
        """Return the tensors by argument name."""
        given = {
            f"{self.prefix}indptr": self.indptr,
            f"{self.prefix}indices": self.indices,
            f"{self.prefix}last_page_len": self.last_page_len,
        }
        return given if self.qo_indptr is None else {"qo_indptr": self.qo_indptr, **given}

    def check(self, device: torch.device, page_size: int) -> None:
        """Raise `ValueError`/`TypeError` for a bad tensor, and for bad values if they are known."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        for name, tensor in self.named().items():
            check_place(name, tensor, device)
        entries = self.batch_size + 1
        for name, ends in self.named().items():
            if name.endswith("indptr") and ends.numel() != entries:
                raise ValueError(
                    f"{name} must have batch + 1 = {entries} entries ({self.prefix}last_page_len "
                    f"names {self.batch_size} requests), got {ends.numel()}"
                )
        self._check_values(page_size)

    def _check_values(self, page_size: int) -> None:
        if self.qo_indptr is not None:
            _check_ends("qo_indptr", _known(self.qo_indptr))
        indptr = _known(self.indptr)
        _check_ends(f"{self.prefix}indptr", indptr)
        entries = self.indices.numel()
        if indptr is None and not entries and self.batch_size:
            raise ValueError(
                f"{self.prefix}indices has no entries: if no request has keys, say so with a "
                f"{self.prefix}indptr on the host"
            )
        if indptr and indptr[-1] > entries:
            raise ValueError(
                f"{self.prefix}indptr ends at {indptr[-1]}, {self.prefix}indices has {entries} "
                "entries"
            )
        for request, tokens in enumerate(_known(self.last_page_len) or ()):
            # Without pages it is not used.
            used = indptr is None or indptr[request + 1] > indptr[request]
            if not 0 <= tokens <= page_size and used:
                raise ValueError(
                    f"{self.prefix}last_page_len must be from 0 to page_size = {page_size}, "
                    f"request {request} has {tokens}"
                )
        if indptr and indptr[-1] > indptr[0] and self.indices.device.type == "cpu":
            lowest = int(self.indices[indptr[0] : indptr[-1]].min())
            if lowest < 0:
                raise ValueError(f"{self.prefix}indices must not be negative, got {lowest}")

    def row_counts(self) -> tuple[int, int] | None:
        """Return `qo_indptr[-1]` and the longest query, in tokens, if the host knows them."""
        if self.qo_indptr is None or self.qo_indptr.device.type != "cpu":
            return None
        ends = self.qo_indptr.tolist()
        return ends[-1], max((end - begin for begin, end in pairwise(ends)), default=0)


@dataclass(frozen=True, slots=True)
class GraphBuffers:
    """The caller's fixed buffers: written in place, never replaced.

    Entries past the batch are padded so that these requests have no queries and no keys: both
    `indptr` stay at their last value, `last_page_len` is 0.
    """

    indptr: Tensor  # [capacity + 1] int32, device
    indices: Tensor  # [max entries] int32, device
    last_page_len: Tensor  # [capacity] int32, device
    qo_indptr: Tensor | None = None  # [capacity + 1] int32, device

    @classmethod
    def of(cls, device: torch.device, **buffers: Tensor | None) -> GraphBuffers:
        """Check a constructor's arguments; their order is that of the fields."""
        for name, buffer in buffers.items():
            if buffer is None:
                raise ValueError(
                    f"{name} must be a torch.Tensor with use_cuda_graph=True, got None"
                )
            check_index_tensor(name, buffer, device)
        (indptr_name, _, last_name, *_) = buffers
        made = cls(*buffers.values())  # type: ignore[arg-type]
        for name, ends in ((indptr_name, made.indptr), ("qo_indptr_buf", made.qo_indptr)):
            if ends is not None and ends.numel() != made.capacity + 1:
                raise ValueError(
                    f"{name} must have batch + 1 = {made.capacity + 1} entries ({last_name} has "
                    f"{made.capacity}), got {ends.numel()}"
                )
        return made

    @property
    def capacity(self) -> int:
        """Most requests of a step."""
        return self.last_page_len.numel()

    def check_room(self, step: StepMetadata) -> None:
        """Raise `ValueError` if a step exceeds the buffers."""
        if step.batch_size > self.capacity:
            raise ValueError(
                f"the batch size must be at most {self.capacity}, what the CUDA graph buffers "
                f"hold, got {step.batch_size}"
            )
        if step.indices.numel() > self.indices.numel():
            raise ValueError(
                f"{step.prefix}indices must have at most {self.indices.numel()} entries, what the "
                f"CUDA graph buffer holds, got {step.indices.numel()}"
            )

    def write(self, step: StepMetadata) -> None:
        """Copy a checked step into the buffers and pad them."""
        pairs = [
            (self.indptr, step.indptr),
            (self.indices, step.indices),
            (self.last_page_len, step.last_page_len),
        ]
        if self.qo_indptr is not None and step.qo_indptr is not None:
            pairs.append((self.qo_indptr, step.qo_indptr))
        host = [source for buffer, source in pairs if source.device != buffer.device]
        staged = cut(stage(host), host)
        for buffer, source in pairs:
            target = buffer[: source.numel()]
            if source.device != buffer.device:
                target.copy_(staged.pop(0), non_blocking=True)
            elif source.data_ptr() != buffer.data_ptr():
                target.copy_(source)
        self.pad(step.batch_size)

    def pad(self, batch_size: int) -> None:
        """Make the requests past `batch_size` empty."""
        if batch_size == self.capacity:
            return
        for ends in (self.indptr, self.qo_indptr):
            if ends is not None:
                ends[batch_size + 1 :].copy_(ends[batch_size])
        self.last_page_len[batch_size:].zero_()


class RowStarts:
    """`qo_indptr` of requests with equally many rows, kept: graphs rely on its address."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[int, Tensor] = {}  # by rows of a request

    def get(self, requests: int, q_len: int) -> Tensor:
        """Return `[requests + 1]` multiples of `q_len`."""
        starts = self._kept.get(q_len)
        if starts is None or starts.numel() <= requests:
            end = (requests + 1) * q_len
            starts = torch.arange(0, end, q_len, dtype=torch.int32, device=self._device)
            # What a capture makes has no values before the graph runs.
            if not is_capturing(self._device):
                self._kept[q_len] = starts
        return starts[: requests + 1]


def _known(tensor: Tensor) -> list[int] | None:
    """Return the values, None if that would wait for the device."""
    if tensor.device.type == "cpu" or values_are_checked(tensor.device):
        return list(tensor.tolist())
    return None


def _check_ends(name: str, ends: list[int] | None) -> None:
    if not ends:
        return
    if ends[0] < 0:
        raise ValueError(f"{name} must not start below 0, got {ends[0]}")
    for request, (begin, end) in enumerate(pairwise(ends)):
        if end < begin:
            raise ValueError(f"{name} must not decrease, request {request} spans [{begin}, {end})")
