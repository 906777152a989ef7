"""Run a real language model in a real engine on our kernels, and check what comes out.

SmolLM2-135M-Instruct in Hugging Face transformers' continuous batching, greedy, first with
"paged|sdpa" and then with "paged|tritonattn": both texts must have the same tokens, save for near
ties. A short check of the ops comes first. Without a GPU the kernels run in Triton's interpreter,
with fewer prompts and tokens.

Exit status: 0 all checks passed; 1 one failed, or a request or the engine did, or it hung; 2 wrong
arguments; 3 the ops passed, but the model could not run because something is not installed (the
message says what).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tritonattn import __version__
from tritonattn.cli import FAILED, INCOMPLETE, OK, UsageError
from tritonattn.demo import generation, model, weights
from tritonattn.info import version

# The first two are short: without a GPU a token costs seconds.
PROMPTS = (
    "The sun rises in the",
    "Once upon a time, there was a small village by the sea where",
    "The capital of France is the city of",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees Celsius because",
    "The three primary colors are",
    "To make a good cup of tea, first",
    "In 1969, Neil Armstrong became the first person to walk on the Moon. When he stepped down "
    "from the ladder he said that it was one small step for a man, and one giant leap for mankind. "
    "What he meant by this was that",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--device", metavar="DEVICE", help="cuda, cuda:N or cpu; default: a GPU")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="new tokens a prompt (default: 16, on a GPU 64)"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        metavar="N",
        help=f"how many prompts, up to {len(PROMPTS)} (default: 2, on a GPU {len(PROMPTS)})",
    )
    parser.add_argument("--quick", action="store_true", help="4 tokens for 2 prompts")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a Hugging Face model folder, instead of SmolLM2"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")


def run(args: argparse.Namespace) -> int:
    """Check the ops, then the model; print and return the exit status."""
    started = time.perf_counter()
    num_prompts, num_tokens = _sizes(args)
    if args.json is not None and not args.json.parent.is_dir():
        raise UsageError(f"--json: there is no folder {args.json.parent}")
    on_cpu = args.device == "cpu"
    device = "the CPU (Triton's interpreter)" if on_cpu else torch.cuda.get_device_name(args.device)
    dtype = torch.float32 if on_cpu else torch.bfloat16
    results: dict[str, Any] = {"versions": _versions(), "device": device}
    print(f"tritonattn {__version__} on {device}, torch {torch.__version__}")

    status = _check_ops(args.device, dtype, results)
    stuck = False
    try:
        agreed = model.show(
            args.model, args.device, dtype, PROMPTS[:num_prompts], num_tokens, results
        )
        status = status if agreed else FAILED
    except (ImportError, weights.WeightsMissingError) as error:
        results["error"] = str(error)
        print(f"\nThe model was not run: {error}")
        status = status or INCOMPLETE
    except generation.GenerationError as error:
        results["error"] = str(error)
        print(f"\nFAILED: {error}")
        status = FAILED
        stuck = isinstance(error, generation.StallError) and error.thread_alive

    results["seconds"] = time.perf_counter() - started
    results["exit_status"] = status
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    word = {OK: "All checks passed", FAILED: "FAILED", INCOMPLETE: "Incomplete"}[status]
    print(f"\n{word} in {results['seconds']:.0f} s", flush=True)
    if stuck:
        # The engine's thread hangs, and Python would wait for it.
        sys.stderr.flush()
        os._exit(status)
    return status


def _sizes(args: argparse.Namespace) -> tuple[int, int]:
    """Return how many prompts and how many new tokens each."""
    on_cpu = args.device == "cpu"
    prompts, tokens = args.prompts, args.tokens
    if prompts is None:
        prompts = 2 if args.quick or on_cpu else len(PROMPTS)
    if tokens is None:
        tokens = 4 if args.quick else 16 if on_cpu else 64
    if tokens < 1:
        raise UsageError(f"--tokens must be at least 1, got {tokens}")
    if not 1 <= prompts <= len(PROMPTS):
        raise UsageError(f"--prompts must be from 1 to {len(PROMPTS)}, got {prompts}")
    return prompts, tokens


def _versions() -> dict[str, str]:
    packages = ("torch", "triton", "transformers")
    return {"tritonattn": __version__, **{package: version(package) for package in packages}}


def _check_ops(device: str, dtype: torch.dtype, results: dict[str, Any]) -> int:
    # Here, so that the command's help does not import what the ops need.
    from tritonattn.demo import ops

    print(f"\nThe ops against their oracles, {model.dtype_name(dtype)}\n{ops.HEADER}", flush=True)
    checks = []
    for check in ops.check_ops(device, dtype):
        print(check.row(), flush=True)
        checks.append(check)
    results["ops"] = [{"op": c.op, "case": c.case, **c.report.to_dict()} for c in checks]
    failed = [check for check in checks if not check.report.passed]
    for check in failed:
        print(f"\n{check.report}")
    return FAILED if failed else OK
