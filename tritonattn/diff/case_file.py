"""Save the inputs of one call to a file, and load them back with the same shapes and strides.

The file holds tensors and plain Python values only, so it loads with ``weights_only=True``: a case
from a stranger's bug report runs no code. A view is saved without the storage around it. Tensors
that share a storage come back with a storage each.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

CASE_FORMAT = "tritonattn-case"
CASE_VERSION = 1
_SCALARS = (type(None), bool, int, float, str, torch.dtype)


def dump_case(path: str | os.PathLike[str], /, **values: Any) -> None:
    """Save tensors and parameters of a call.

    Parameters
    ----------
    path : path
        File to write; an existing one is replaced.
    **values
        Tensors, None, bool, int, float, str, torch.dtype, and lists, tuples or dicts (with string
        keys) of these.
    """
    items = {key: _encode(value, key) for key, value in values.items()}
    torch.save({"format": CASE_FORMAT, "version": CASE_VERSION, "values": items}, path)


def load_case(
    path: str | os.PathLike[str], /, *, device: str | torch.device = "cpu"
) -> dict[str, Any]:
    """Load what `dump_case` saved.

    Parameters
    ----------
    path : path
        File that `dump_case` wrote.
    device : str or torch.device
        Where the tensors go, wherever they were.

    Returns
    -------
    dict
        The keyword arguments of `dump_case`. Tensors have the shape, strides and dtype they had.
        Memory between the elements of a view holds 0xFF bytes (NaN, or -1), so that a kernel that
        reads it shows.
    """
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or content.get("format") != CASE_FORMAT:
        raise ValueError(f"{os.fspath(path)} is not a case file: it has no {CASE_FORMAT!r} mark")
    if content.get("version") != CASE_VERSION:
        raise ValueError(
            f"{os.fspath(path)} is a case file of version {content.get('version')}; "
            f"this release reads version {CASE_VERSION}"
        )
    device = torch.device(device)
    return {key: _decode(value, device) for key, value in content["values"].items()}


def _encode(value: Any, where: str) -> Any:
    if isinstance(value, Tensor):
        return _encode_tensor(value, where)
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {"kind": kind, "items": [_encode(v, f"{where}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"{where} must have string keys, got {list(value)}")
        items = {key: _encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        return {"kind": "dict", "items": items}
    # type(), not isinstance: a subclass (an enum, numpy's float64) would not load again.
    if type(value) not in _SCALARS:
        raise TypeError(
            f"{where} must be a tensor, None, bool, int, float, str, torch.dtype, or a list, "
            f"tuple or dict of these, got {type(value).__name__}"
        )
    return value


def _encode_tensor(tensor: Tensor, where: str) -> dict[str, Any]:
    if tensor.layout != torch.strided:
        raise TypeError(f"{where} must be a strided tensor, got layout {tensor.layout}")
    base = tensor.detach().as_strided(_stored_shape(tensor.shape, tensor.stride()), tensor.stride())
    span = _span(base.shape, base.stride())
    # Contiguous or permuted: the storage from the first to the last element is all elements, and
    # is saved as it is. A view with gaps is saved as its elements only.
    has_gaps = span > base.numel()
    flat = base.reshape(-1) if has_gaps else base.as_strided((span,), (1,))
    return {
        "kind": "tensor",
        "data": flat.clone().cpu(),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "has_gaps": has_gaps,
    }


def _decode(value: Any, device: torch.device) -> Any:
    if not isinstance(value, dict):
        return value
    if value["kind"] == "tensor":
        return _decode_tensor(value, device)
    if value["kind"] == "dict":
        return {key: _decode(item, device) for key, item in value["items"].items()}
    items = [_decode(item, device) for item in value["items"]]
    return tuple(items) if value["kind"] == "tuple" else items


def _decode_tensor(record: dict[str, Any], device: torch.device) -> Tensor:
    data, shape, stride = record["data"].to(device), record["shape"], record["stride"]
    if record["has_gaps"]:
        storage = _poison(_span(shape, stride), data.dtype, device)
        # By offset, not through a view: elements of an overlapping view may share a place.
        storage[_offsets(_stored_shape(shape, stride), stride, device)] = data
        data = storage
    return torch.as_strided(data, shape, stride)


def _stored_shape(shape: list[int] | torch.Size, stride: list[int] | tuple[int, ...]) -> list[int]:
    """Return the shape with expanded dimensions (stride 0) reduced to the one row they repeat."""
    return [size if step else min(size, 1) for size, step in zip(shape, stride, strict=True)]


def _span(shape: list[int] | torch.Size, stride: list[int] | tuple[int, ...]) -> int:
    """Return the number of elements from the first to the last one of a strided tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _offsets(shape: list[int], stride: list[int], device: torch.device) -> Tensor:
    """Return the storage offset of every element, int64, in the order of ``reshape(-1)``."""
    offsets = torch.zeros(1, dtype=torch.int64, device=device)
    for size, step in zip(shape, stride, strict=True):
        along = torch.arange(size, dtype=torch.int64, device=device) * step
        offsets = (offsets[:, None] + along).reshape(-1)
    return offsets


def _poison(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype == torch.bool:  # 0xFF is no bool
        return torch.zeros(numel, dtype=dtype, device=device)
    raw = torch.full((numel * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device)
    return raw.view(dtype)
