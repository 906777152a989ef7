"""Two pipeline stages in two processes; with a GPU each replays its own graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_pipeline(device: str, folder: Path, **environment: str) -> None:
    """Run both ranks and assert that each came through all its steps."""
    command = [sys.executable, str(ROOT / "tests/pipeline.py")]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "meeting"), "--device", device],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for index, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0, output
        assert f"rank {index}: 10 steps on {device}" in output


def test_two_processes_on_the_cpu(tmp_path: Path) -> None:
    # Outside the interpreter: the reference, which this test leaves time for.
    run_pipeline("cpu", tmp_path, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_two_processes_with_graphs(tmp_path: Path) -> None:
    run_pipeline("cuda", tmp_path, TRITON_INTERPRET="0")
