"""Environment variables: the only module that reads `os.environ`.

| variable | values | meaning |
|---|---|---|
| `TRITONATTN_VALIDATE` | `0`, `1` | check values on the device, outside of captures; synchronizes |
| `TRITONATTN_CACHE_DIR` | folder | what the demo keeps; default: `tritonattn` in the user's cache |
| `TRITONATTN_DEMO_MODEL` | folder | Hugging Face model for the demo and its GPU test |
| `TRITONATTN_COMMIT` | text | commit that sweeps record where the sources have no `.git` |
| `TRITONATTN_BACKEND` | `triton`, `flashinfer`, `reference` | for calls that choose none |
| `TRITONATTN_POLICY` | file, or h200 | which backend is faster where; read once |
| `TRITON_INTERPRET` | `0`, `1` | Triton's own: kernels take CPU tensors; fixed at its import |

Flags are 0 by default.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


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


def cache_dir() -> Path:
    """Return the folder for files that may be made again; it may not exist."""
    chosen = os.environ.get("TRITONATTN_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tritonattn"
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tritonattn"


def demo_model() -> Path | None:
    """Return the folder of the model that the demo is to run, if one is chosen."""
    chosen = os.environ.get("TRITONATTN_DEMO_MODEL")
    return Path(chosen).expanduser() if chosen else None


def commit() -> str | None:
    """Return the commit that the sources are said to be of, if it is said."""
    return os.environ.get("TRITONATTN_COMMIT") or None


def policy() -> Path | None:
    """Return the file of the measured policy, if one is chosen."""
    chosen = os.environ.get("TRITONATTN_POLICY")
    return Path(chosen).expanduser() if chosen else None


def backend() -> str:
    """Return the backend for calls that choose none; "auto" if that is left open."""
    chosen = os.environ.get("TRITONATTN_BACKEND")
    return (chosen and chosen.strip().lower()) or "auto"


def with_interpreter() -> dict[str, str]:
    """Return the environment of a process whose kernels run on CPU tensors."""
    return {**os.environ, "TRITON_INTERPRET": "1"}


def with_checkout(tree: Path) -> dict[str, str]:
    """Return the environment of a process that imports this library from a checkout."""
    # The tree comes first, then whatever brings the peers.
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}
