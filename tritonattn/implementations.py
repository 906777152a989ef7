"""Which implementation of an operation serves a device: the kernels, or their torch twins."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from tritonattn import env


def implementation(op: str, device: torch.device) -> ModuleType:
    """Return the module of an operation: `kernels.<op>`, or its twin `reference.<op>`.

    CPU tensors go to the kernels in Triton's interpreter and to the twins outside it.

    Raises
    ------
    ValueError
        If nothing serves the device.
    """
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"tensors must be on a CUDA (or ROCm) device or the CPU, got {device}")
    if device.type == "cuda" and env.INTERPRET:
        raise ValueError(f"with TRITON_INTERPRET=1 tensors must be on the CPU, got {device}")
    package = "kernels" if device.type == "cuda" or env.INTERPRET else "reference"
    return importlib.import_module(f"tritonattn.{package}.{op}")
