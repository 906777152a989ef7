"""Metadata on its way from the host to the device: one transfer, and nothing waits for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonattn import env
from tritonattn.layout import check_index_tensor

_CPU = torch.device("cpu")


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream records a CUDA graph."""
    if device.type != "cuda":
        return False
    if device.index in (None, torch.cuda.current_device()):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def values_are_checked(device: torch.device) -> bool:
    """Return whether values on the device are to be checked here: a capture cannot read them."""
    return env.validate_values() and not is_capturing(device)


def check_place(name: str, tensor: Tensor, device: torch.device, ndim: int = 1) -> None:
    """Raise unless `tensor` is int32 metadata on the host or on `device`."""
    if isinstance(tensor, Tensor) and tensor.device not in (device, _CPU):
        raise ValueError(f"{name} must be on the host or on {device}, got {tensor.device}")
    check_index_tensor(name, tensor, getattr(tensor, "device", device), ndim)
    if tensor.device != device and is_capturing(device):
        raise ValueError(
            f"{name} is on the host: a CUDA graph would replay this step's values for ever: give "
            "device tensors inside a capture, or copy them to the device before it"
        )


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on `device`: those on the host by one copy that nothing waits for."""
    host = [tensor for tensor in tensors if tensor.device != device]
    if not host:
        return list(tensors)
    moved = cut(stage(host).to(device, non_blocking=True), host)
    return [moved.pop(0) if tensor.device != device else tensor for tensor in tensors]


def stage(tensors: Sequence[Tensor]) -> Tensor:
    """Copy host tensors into one block of pinned memory, to be cut like `tensors`.

    The copy to the device may happen after the call that asked for it has returned, and the caller
    may rewrite his tensors by then, also if they are pinned. torch keeps the block until that copy
    is done.
    """
    entries = sum(_padded(tensor.numel()) for tensor in tensors)
    pin = bool(tensors) and torch.cuda.is_available()
    block = torch.empty(entries, dtype=torch.int32, pin_memory=pin)
    for part, tensor in zip(cut(block, tensors), tensors, strict=True):
        part.copy_(tensor)
    return block


def pinned(tensor: Tensor) -> Tensor:
    """Copy a host tensor into pinned memory, which torch keeps until its transfers are done."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def cut(block: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a staged block of the shapes of `tensors`."""
    begin, parts = 0, []
    for tensor in tensors:
        parts.append(block[begin : begin + tensor.numel()].view(tensor.shape))
        begin += _padded(tensor.numel())
    return parts


def _padded(entries: int) -> int:
    """Return the room for an int32 tensor, so that all parts of a block are aligned alike."""
    return -(-entries // 64) * 64
