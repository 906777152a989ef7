"""Environment variables: the only module that reads `os.environ`.

| variable | values | meaning |
|---|---|---|
| `TRITONATTN_VALIDATE` | `0` (default), `1` | check values that live on the device (page ids, lengths); synchronizes |
| `TRITON_INTERPRET` | `0` (default), `1` | Triton's own: run kernels on CPU tensors; fixed once Triton is imported |
"""

from __future__ import annotations

import os


def _flag(name: str) -> bool:
    value = os.environ.get(name, "0").strip().lower()
    if value in ("1", "true", "on", "yes"):
        return True
    if value in ("", "0", "false", "off", "no"):
        return False
    raise ValueError(f"{name} must be 0 or 1, got {value!r}")


# Triton decides at the decoration of each kernel; a later change of the variable has no effect.
INTERPRET: bool = _flag("TRITON_INTERPRET")


def validate_values() -> bool:
    """Return whether values that live on the device are to be checked (costs a synchronization)."""
    return _flag("TRITONATTN_VALIDATE")
