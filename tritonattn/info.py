"""Show versions, devices, backends and settings, for a bug report."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
from importlib import metadata
from typing import Any

import torch

from tritonattn import __version__, env

# Distribution names: the peers, and the engines that adapters exist for.
_PACKAGES = ("torch", "triton", "numpy", "flashinfer-python", "transformers", "vllm", "pandas")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what there is; always succeeds."""
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:{width}}  {', '.join(value) or 'none' if isinstance(value, list) else value}")
    return 0


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
