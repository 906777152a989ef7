"""One allocation of fixed size for all stages of a pipeline: `PipelineBuffers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonattn import checks
from tritonattn.stage import StageBuffers, StageCapacity, aligned, part_bytes


class PipelineBuffers:
    """One allocation for all stages of a pipeline.

    Examples
    --------
    >>> buffers = PipelineBuffers.allocate(
    ...     num_stages=2, max_batch_size=256, max_num_tokens=8192, max_pages_per_request=512,
    ...     num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16,
    ...     device="cuda",
    ... )
    >>> out = paged_attention(q, kv_cache, **metadata, buffers=buffers.stage(0))
    """

    def __init__(self, stages: list[StageBuffers], memory: Tensor) -> None:
        self._stages = stages
        self._memory = memory

    @classmethod
    def allocate(
        cls,
        *,
        num_stages: int,
        max_batch_size: int,
        max_num_tokens: int,
        max_pages_per_request: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> PipelineBuffers:
        """Allocate the stages, each with an empty step.

        Parameters
        ----------
        num_stages : int
        max_batch_size : int
            Requests of a step.
        max_num_tokens : int
            Rows of q, padding included.
        max_pages_per_request : int
        num_qo_heads, num_kv_heads, head_dim : int
        page_size : int
            Tokens.
        dtype : torch.dtype
            Of q and of the cache.
        device : torch.device or str

        Raises
        ------
        ValueError, TypeError
            For a size that is not positive, or a geometry that the library does not take.
        """
        capacity = StageCapacity(
            max_batch_size, max_num_tokens, max_pages_per_request, num_qo_heads, num_kv_heads,
            head_dim, page_size, dtype,
        )  # fmt: skip
        _check_num_stages(num_stages)
        place = _as_device(device)
        size = _stage_bytes(capacity, place)
        memory = torch.zeros(num_stages * size, dtype=torch.uint8, device=place)
        stages = [
            StageBuffers(index, capacity, part)
            for index, part in enumerate(torch.split(memory, size))
        ]
        for stage in stages:
            stage.block_table.fill_(-1)
        return cls(stages, memory)

    @staticmethod
    def size_bytes(*, num_stages: int, device: torch.device | str = "cuda", **capacity: Any) -> int:
        """Return what `allocate` would take, in bytes; the arguments are the same.

        The work lists depend on how many multiprocessors the device has.
        """
        _check_num_stages(num_stages)
        return num_stages * _stage_bytes(StageCapacity(**capacity), _as_device(device))

    @property
    def num_stages(self) -> int:
        """Return how many stages there are."""
        return len(self._stages)

    @property
    def nbytes(self) -> int:
        """Return the size of the allocation, in bytes."""
        return self._memory.nbytes

    def stage(self, index: int) -> StageBuffers:
        """Return a stage; raise `IndexError` unless 0 <= index < num_stages."""
        if not 0 <= index < len(self._stages):
            raise IndexError(f"stage must be from 0 to {len(self._stages) - 1}, got {index}")
        return self._stages[index]


def _stage_bytes(capacity: StageCapacity, device: torch.device) -> int:
    return sum(aligned(size) for size in part_bytes(capacity, device))


def _check_num_stages(num_stages: int) -> None:
    if not checks.as_bound("num_stages", num_stages):
        raise ValueError(f"num_stages must be at least 1, got {num_stages}")


def _as_device(device: torch.device | str) -> torch.device:
    """Return a device with its index, as tensors have it."""
    return torch.empty(0, device=device).device
