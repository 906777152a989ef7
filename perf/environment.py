"""What a figure depends on beside the code: the environment columns of the table."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import triton

import tritonattn
from tritonattn import env
from tritonattn.info import version


def environment(device: torch.device) -> dict[str, Any]:
    """Return the environment columns; None where something is not there."""
    gpu = device.type == "cuda"
    return {
        "device": "cuda" if gpu else "interpreter",
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "sm": ".".join(map(str, torch.cuda.get_device_capability(device))) if gpu else None,
        "driver": _driver() if gpu else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "flashinfer": _installed("flashinfer-python"),
        "vllm": _installed("vllm"),
        "tritonattn": tritonattn.__version__,
        "python": platform.python_version(),
        **_commit(),
    }


def _installed(package: str) -> str | None:
    found = version(package)
    return None if found == "not installed" else found


def _driver() -> str | None:
    lines = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return lines.partition("\n")[0].strip() if lines else None


def _commit() -> dict[str, Any]:
    """Return the commit of the checkout that this file is in, or the one that is named."""
    named = env.commit()
    if named:
        return {"git_commit": named, "git_dirty": None}
    checkout = Path(__file__).resolve().parent.parent
    # An installed copy may lie inside some other repository.
    if not (checkout / ".git").exists():
        return {"git_commit": None, "git_dirty": None}
    git = ["git", "-C", str(checkout)]
    commit = _output([*git, "rev-parse", "--short=12", "HEAD"])
    changes = _output([*git, "status", "--porcelain", "--untracked-files=no"])
    return {"git_commit": commit.strip() if commit else None, "git_dirty": bool(changes)}


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
