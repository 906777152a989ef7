"""Show versions, devices, backends and settings, for a bug report."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
from importlib import metadata
from typing import Any

import torch

from tritonattn import PipelineBuffers, __version__, env
from tritonattn.cli import UsageError
from tritonattn.spec import DTYPES

# Distribution names: the peers, and the engines that adapters exist for.
_PACKAGES = ("torch", "triton", "numpy", "flashinfer-python", "transformers", "vllm", "pandas")
_SIZE_NAMES = (
    "num_stages", "max_batch_size", "max_num_tokens", "max_pages_per_request", "num_qo_heads",
    "num_kv_heads", "head_dim", "page_size", "dtype",
)  # fmt: skip
SIZE_EXAMPLE = (
    "num_stages=4,max_batch_size=512,max_num_tokens=8192,max_pages_per_request=2048,"
    "num_qo_heads=32,num_kv_heads=8,head_dim=128,page_size=16,dtype=bf16"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--size",
        metavar="NAME=VALUE,...",
        help="the size of PipelineBuffers.allocate with these arguments instead, such as "
        f"{SIZE_EXAMPLE}; dtype is {', '.join(DTYPES)}",
    )


def run(args: argparse.Namespace) -> int:
    """Print what there is, or the size of stage buffers."""
    facts = collect() if args.size is None else size(args.size)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:{width}}  {', '.join(value) or 'none' if isinstance(value, list) else value}")
    return 0


def size(text: str) -> dict[str, Any]:
    """Return the size of the stage buffers that `name=value,...` describe, and of their parts."""
    words = [word.partition("=") for word in text.split(",")]
    given: dict[str, Any] = {name.strip(): value.strip() for name, _, value in words}
    device = given.pop("device", "cuda" if torch.cuda.is_available() else "cpu")
    names = [parameter for parameter in _SIZE_NAMES if parameter not in given]
    unknown = sorted(set(given) - set(_SIZE_NAMES))
    if names or unknown:
        raise UsageError(
            f"--size needs {', '.join(_SIZE_NAMES)}; missing: {', '.join(names) or 'none'}, "
            f"unknown: {', '.join(unknown) or 'none'}"
        )
    if given["dtype"] not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, got {given['dtype']!r}")
    try:
        numbers = {name: int(value) for name, value in given.items() if name != "dtype"}
        total = PipelineBuffers.size_bytes(**numbers, dtype=DTYPES[given["dtype"]], device=device)
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise UsageError(f"--size: {error}") from error
    stages = numbers["num_stages"]
    return {
        "device": device,
        "bytes": total,
        "bytes of a stage": total // stages,
        "MiB": round(total / 2**20, 2),
    }


def collect() -> dict[str, Any]:
    """Return the facts as plain values, in the order in which they are shown."""
    facts: dict[str, Any] = {"tritonattn": __version__, "python": platform.python_version()}
    facts["platform"] = platform.platform()
    for package in _PACKAGES:
        facts[package] = version(package)
    # What is imported, and for which CUDA: the distribution may leave that out.
    facts["torch"] = torch.__version__
    facts["cuda"] = torch.version.cuda or "none"
    facts["devices"] = [_device(i) for i in range(torch.cuda.device_count())]
    facts["backends"] = _backends()
    facts["TRITON_INTERPRET"] = str(int(env.INTERPRET))
    facts["TRITONATTN_VALIDATE"] = str(int(env.validate_values()))
    facts["cache folder"] = str(env.cache_dir())
    return facts


def version(package: str) -> str:
    """Return the version of an installed distribution, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _device(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    capability = f"sm_{properties.major}{properties.minor}"
    gigabytes = properties.total_memory / 2**30
    return (
        f"cuda:{index} {properties.name} ({capability}, {properties.multi_processor_count} SMs, "
        f"{gigabytes:.0f} GiB)"
    )


def _backends() -> list[str]:
    """Return the backends that can run something here, the automatic choice first."""
    usable = ["reference"]
    if env.INTERPRET or torch.cuda.is_available():
        usable.insert(0, "triton")
    if torch.cuda.is_available() and importlib.util.find_spec("flashinfer") is not None:
        usable.insert(1, "flashinfer")
    return usable
