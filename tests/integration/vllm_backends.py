"""vLLM on a real model: CUSTOM beside vLLM's own backends, eager and in graphs.

    python -m tests.integration.vllm_backends MODEL --out DIR [--only NAME...] [--speed]

Needs a GPU, vLLM 0.25 and a model as a Hugging Face folder. Each engine is a process
(`vllm_engine`); all start at once, those that measure speed afterwards, one by one. Exit status 1
if an engine failed or `vllm_judge` finds something wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.vllm_judge import judge

BASELINE = "FLASH_ATTN"
CONTROL = "TRITON_ATTN"
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
ROOT = Path(__file__).parents[2]


def graphs(mode: str, **more: Any) -> dict[str, Any]:
    config = {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": SIZES}
    return {"compilation_config": config, **more}


EAGER: dict[str, Any] = {"enforce_eager": True}


@dataclass(frozen=True)
class Run:
    """An engine to start."""

    backend: str
    engine: dict[str, Any]
    parts: tuple[str, ...] = ("rows", "many")
    environment: dict[str, str] = field(default_factory=dict)
    watched: bool = False  # its calls, which must not wait
    long_queries: bool = False  # graphs must have held steps of several tokens a request


# At most 256 tokens a step: prefills run in chunks, and in the graphs of mixed steps.
CHUNKS = {"max_num_batched_tokens": 256}
RUNS = {
    BASELINE: Run(BASELINE, EAGER, ("rows", "many", "facts")),
    CONTROL: Run(CONTROL, EAGER),
    "custom, eager": Run("CUSTOM", EAGER, ("rows", "many", "profile"), watched=True),
    "custom, FULL": Run("CUSTOM", graphs("FULL"), watched=True),
    "custom, FULL, chunks": Run(
        "CUSTOM", graphs("FULL", **CHUNKS), watched=True, long_queries=True
    ),
    "custom, decode graphs": Run("CUSTOM", graphs("FULL_DECODE_ONLY"), watched=True),
    "custom, chunks and prefix cache": Run(
        "CUSTOM", graphs("FULL", enable_prefix_caching=True, **CHUNKS),
        ("rows", "many", "facts", "twice"), watched=True, long_queries=True,
    ),
    "custom, as vLLM compiles by itself": Run("CUSTOM", {}),
    "custom, model runner V1": Run(
        "CUSTOM", graphs("FULL", **CHUNKS), environment={"VLLM_USE_V2_MODEL_RUNNER": "0"},
        watched=True,
    ),
    "custom, HND": Run("CUSTOM", graphs("FULL"), environment={"VLLM_KV_CACHE_LAYOUT": "HND"}),
    "custom, engine in its own process": Run(
        "CUSTOM", graphs("FULL_DECODE_ONLY"), environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    ),
    "custom, flashinfer inside": Run(
        "CUSTOM", EAGER, environment={"TRITONATTN_BACKEND": "flashinfer"}
    ),
    # Room for three of the six prompts on the GPU.
    "custom, KV offloading": Run(
        "CUSTOM",
        graphs("FULL_DECODE_ONLY", enable_prefix_caching=True, kv_offloading_size=2.0,
               max_model_len=4096, num_gpu_blocks_override=320),
        ("facts",),
    ),
}  # fmt: skip
SPEEDS = {
    f"speed of {name}": Run(name, graphs("FULL_DECODE_ONLY"), ("speed",))
    for name in ("CUSTOM", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
}


def plug_in(folder: Path) -> None:
    """Write what `pip install tritonattn` would, so that vLLM finds the entry point."""
    info = folder / "tritonattn-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tritonattn\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ntritonattn = tritonattn.engines.vllm:register\n"
    )


def files(out: Path, name: str) -> tuple[Path, Path]:
    """Return where an engine's tokens and its log go."""
    slug = name.replace(", ", "-").replace(" ", "_")
    return out / f"{slug}.json", out / f"{slug}.log"


def start(name: str, run: Run, args: argparse.Namespace, site: Path) -> subprocess.Popen[bytes]:
    """Start an engine; what an earlier one of that name left is removed."""
    results, log = files(args.out, name)
    results.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "tests.integration.vllm_engine", run.backend, str(args.model),
        str(results), "--engine", json.dumps(run.engine), "--part", *run.parts,
    ]  # fmt: skip
    command += ["--watch"] if run.watched else []
    path = os.pathsep.join(filter(None, [str(site), str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = {"PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with log.open("wb") as file:
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **ours, **run.environment}, stdout=file,
            stderr=file,
        )  # fmt: skip


def wait(process: subprocess.Popen[bytes], until: float) -> str:
    """Return what went wrong with a process, empty if nothing did."""
    try:
        status = process.wait(max(until - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        process.kill()
        return "took too long"
    return f"exit status {status}" if status else ""


def main() -> int:
    """Start the engines, judge them, and say."""
    parser = argparse.ArgumentParser(description="CUSTOM beside vLLM's own backends.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME")
    parser.add_argument("--speed", action="store_true", help="tokens a second of four backends")
    parser.add_argument("--timeout-s", type=float, default=900.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.timeout_s
    runs = {name: RUNS[name] for name in dict.fromkeys([BASELINE, CONTROL, *args.only])}
    problems = {}
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        plug_in(site)
        started = {name: start(name, run, args, site) for name, run in runs.items()}
        problems = {name: wait(process, until) for name, process in started.items()}
        if args.speed:
            for name, run in SPEEDS.items():
                problems[name] = wait(start(name, run, args, site), until)
    found = {name: _read(args.out, name) for name in problems}
    failed = False
    for name, problem in problems.items():
        results, log = found[name]
        wrong = [problem] if problem else []
        run = runs.get(name)
        if run is not None and not problem:
            wrong += judge(run, results, log, found[BASELINE][0], found[CONTROL][0])
        facts = {k: results.get(k) for k in ("start_s", "calls", "transfers", "profile")}
        facts["tokens_per_s"] = results.get("tokens_per_s")
        shown = {k: v for k, v in facts.items() if v is not None}
        print(f"{name}: {'WRONG: ' + '; '.join(wrong) if wrong else 'right'}; {shown}")
        if problem:
            print("    " + "\n    ".join(log.splitlines()[-8:]))
        failed |= bool(wrong)
    return int(failed)


def _read(out: Path, name: str) -> tuple[dict[str, Any], str]:
    results, log = files(out, name)
    found = json.loads(results.read_text()) if results.exists() else {}
    return found, log.read_text(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
