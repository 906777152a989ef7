"""Which implementation moves a cache's bytes: the kernels, or their torch twins."""

from __future__ import annotations

from typing import Any

import torch

from tritonattn import env


def _takes_kernels(device: torch.device) -> bool:
    """Return whether kernels serve the device; without the interpreter a CPU has the twins."""
    return device.type != "cpu" or env.INTERPRET


def append_op(device: torch.device) -> Any:
    """Return the module with `append_to_slots` and `append_to_table`."""
    if _takes_kernels(device):
        from tritonattn.kernels import append

        return append
    from tritonattn.reference import append as twin

    return twin


def block_op(name: str, device: torch.device) -> Any:
    """Return `copy_blocks` or `zero_blocks` by name."""
    if _takes_kernels(device):
        from tritonattn.kernels import copy_blocks, zero_blocks

        return getattr({"copy_blocks": copy_blocks, "zero_blocks": zero_blocks}[name], name)
    from tritonattn.reference import block_ops as twin

    return getattr(twin, name)
