"""The kernels compile ahead of time for every chip, without spills, within shared memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parent / "aot/check.py"


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_compiles_for(target: str) -> None:
    """In a process of its own: what runs in the interpreter cannot be compiled beside it."""
    run = subprocess.run(
        [sys.executable, CHECK, "--target", target], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = run.stdout.splitlines()
    assert sum(row.startswith("ok") for row in rows) >= 30
    assert rows[-1] == "0 failed"
