"""vLLM on a real model: CUSTOM beside vLLM's own backends, eager and in graphs.

    python -m tests.integration.vllm_backends MODEL --out DIR [--only NAME...] [--speed]

Needs a GPU, vLLM 0.25 and a model as a Hugging Face folder. Each engine is a process
(`vllm_engine`), all at once. Greedy tokens must be those of FLASH_ATTN up to the first near tie: a
position where FLASH_ATTN's own two best logits are within `NEAR_TIE`, one rounding step of bf16.
Exit status 1 if one differs elsewhere, an engine failed, or CUSTOM was not in use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEAR_TIE = 0.125
BASELINE = "FLASH_ATTN"
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
ROOT = Path(__file__).parents[2]


def graphs(mode: str) -> dict[str, Any]:
    return {
        "compilation_config": {
            "mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": SIZES,
        }
    }  # fmt: skip


EAGER: dict[str, Any] = {"enforce_eager": True}


@dataclass(frozen=True)
class Run:
    """An engine to start."""

    backend: str
    engine: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    offload: bool = False
    speed: bool = False  # stands in the table of speeds


RUNS = {
    BASELINE: Run(BASELINE, EAGER),
    "custom, eager": Run("CUSTOM", EAGER),
    "custom, FULL": Run("CUSTOM", graphs("FULL")),
    "custom, decode graphs": Run("CUSTOM", graphs("FULL_DECODE_ONLY"), speed=True),
    "custom, chunks and prefix cache": Run(
        "CUSTOM",
        graphs("FULL") | {"enable_prefix_caching": True, "max_num_batched_tokens": 512},
    ),
    "custom, HND": Run("CUSTOM", graphs("FULL"), {"VLLM_KV_CACHE_LAYOUT": "HND"}),
    "custom, engine in its own process": Run(
        "CUSTOM", graphs("FULL_DECODE_ONLY"), {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    ),
    "custom, flashinfer inside": Run("CUSTOM", EAGER, {"TRITONATTN_BACKEND": "flashinfer"}),
    "custom, KV offloading": Run(
        "CUSTOM",
        graphs("FULL_DECODE_ONLY")
        | {"enable_prefix_caching": True, "kv_offloading_size": 2.0, "max_model_len": 4096,
           "num_gpu_blocks_override": 320},
        offload=True,
    ),
    "FLASH_ATTN, decode graphs": Run("FLASH_ATTN", graphs("FULL_DECODE_ONLY"), speed=True),
    "TRITON_ATTN, decode graphs": Run("TRITON_ATTN", graphs("FULL_DECODE_ONLY"), speed=True),
    "FLASHINFER, decode graphs": Run("FLASHINFER", graphs("FULL_DECODE_ONLY"), speed=True),
}  # fmt: skip


def plug_in(folder: Path) -> None:
    """Write what `pip install tritonattn` would, so that vLLM finds the entry point."""
    info = folder / "tritonattn-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tritonattn\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ntritonattn = tritonattn.engines.vllm:register\n"
    )


def start(name: str, run: Run, args: argparse.Namespace, site: Path) -> subprocess.Popen[bytes]:
    slug = name.replace(", ", "-").replace(" ", "_")
    command = [
        sys.executable, "-m", "tests.integration.vllm_engine", run.backend, str(args.model),
        str(args.out / f"{slug}.json"), "--engine", json.dumps(run.engine),
    ]  # fmt: skip
    command += ["--offload"] if run.offload else []
    command += ["--speed", str(args.out / "lock")] if run.speed and args.speed else []
    path = os.pathsep.join(filter(None, [str(site), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "INFO"}
    environment.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with (args.out / f"{slug}.log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment | run.environment, stdout=log, stderr=log
        )


def verdict(expected: dict[str, Any], got: list[int]) -> tuple[int, float | None]:
    """Return how many tokens agree, and the gap where they stop, None if they do not."""
    for at, (a, b) in enumerate(zip(expected["ids"], got, strict=True)):
        if a != b:
            return at, expected["gaps"][at]
    return len(got), None


def judge(name: str, run: Run, found: dict[str, Any], log: str, baseline: Any) -> list[str]:
    """Return what is wrong with a run."""
    wrong = [] if found.get("done") else ["did not end"]
    if run.backend == "CUSTOM" and "tritonattn serves" not in log:
        wrong.append("tritonattn's log line is missing")
    if run.offload:
        if found.get("first") != found.get("again"):
            wrong.append("other tokens after the blocks were on the CPU")
        if not found.get("loads_of_the_second_round"):
            wrong.append("no block came back from the CPU")
        return wrong
    rows, many = found.get("rows", []), found.get("many", [])
    if (len(rows), len(many)) != (len(baseline["rows"]), 256):
        return [*wrong, "tokens are missing"]
    pairs = [(f"prompt {i}", row, rows[i]["ids"]) for i, row in enumerate(baseline["rows"])] + [
        (f"request {i} of 256", baseline["rows"][1 + i % 8], ids) for i, ids in enumerate(many)
    ]
    compared = [(what, *verdict(expected, got)) for what, expected, got in pairs]
    wrong += [
        f"{what} differs at token {at}, where the best two logits are {gap} apart"
        for what, at, gap in compared
        if gap is not None and gap > NEAR_TIE
    ]
    ties = sum(gap is not None for _, _, gap in compared)
    print(f"{name}: {len(compared)} answers, {len(compared) - ties} equal, {ties} to a near tie or "
          f"beyond; {len(wrong)} wrong")  # fmt: skip
    return wrong


def main() -> int:
    """Start the engines, compare, and say."""
    parser = argparse.ArgumentParser(description="CUSTOM beside vLLM's own backends.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--speed", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys([BASELINE, *args.only]))
    with tempfile.TemporaryDirectory() as folder:
        plug_in(Path(folder))
        started = {name: start(name, RUNS[name], args, Path(folder)) for name in names}
        for process in started.values():
            process.wait()
    read = {name: _read(args.out, name) for name in names}
    baseline = read[BASELINE][0]
    failed = False
    for name in names:
        found, log = read[name]
        wrong = judge(name, RUNS[name], found, log, baseline)
        facts = {k: found.get(k) for k in ("start_s", "calls", "transfers", "tokens_per_s")}
        print(f"  {'WRONG: ' + '; '.join(wrong) if wrong else 'right'}; {facts}")
        if not found.get("done"):
            print("  " + "\n  ".join(log.splitlines()[-8:]))
        failed |= bool(wrong)
    return int(failed)


def _read(folder: Path, name: str) -> tuple[dict[str, Any], str]:
    slug = name.replace(", ", "-").replace(" ", "_")
    file, log = folder / f"{slug}.json", folder / f"{slug}.log"
    return json.loads(file.read_text()) if file.exists() else {}, log.read_text(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
