"""`tritonattn tune`: measure which backend is faster where on this GPU, and write the policy.

Both backends run the cases of a suite by the way that dispatch takes, in CUDA graphs with a cold L2
cache; a backend's plan, shared by the layers of a step, counts with its share of a layer.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tritonattn.cli import OK, UsageError, need
from tritonattn.perf.suites import SUITES, tiny
from tritonattn.policy import Entry, environment_of, op_of_lengths, write_policy

if TYPE_CHECKING:
    import pandas as pd

BACKENDS = ("triton", "flashinfer")
ATTENTION_SUITES = tuple(name for name in SUITES if name not in ("blockops", "host"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the policy, JSON")
    parser.add_argument("--suite", choices=ATTENTION_SUITES, default="peers")
    parser.add_argument("--quick", action="store_true", help="fewer samples of each case")
    parser.add_argument(
        "--layers", type=int, default=32, help="layers that share a plan; default: 32"
    )
    parser.add_argument("--device", help="cuda, cuda:N or cpu")


def run(args: argparse.Namespace) -> int:
    """Sweep both backends, write the policy and say what it says."""
    import torch

    for package in ("pandas", "pyarrow"):
        need(package, "perf")
    from tritonattn.perf import timing
    from tritonattn.perf.providers.ours import through
    from tritonattn.perf.sweep import Settings, sweep

    if args.layers < 1:
        raise UsageError(f"--layers must be at least 1, got {args.layers}")
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    if gpu:
        device = torch.empty(0, device=device).device
        torch.cuda.set_device(device)
    effort = timing.QUICK if args.quick else timing.FULL
    settings = Settings(
        suite=args.suite,
        cases=SUITES[args.suite]() if gpu else tiny(args.suite),
        providers=[through(name) for name in BACKENDS],
        variants=[("graph", "cold")] if gpu else [("eager", "warm")],
        device=device,
        effort=effort if gpu else timing.INTERPRETED,
        budget_s=None,
    )
    with tempfile.TemporaryDirectory(prefix="tritonattn-tune-") as folder:
        frame = sweep(settings, Path(folder))
    entries = entries_of(frame, args.layers)
    if not entries:
        raise UsageError("no backend could be measured in any case: nothing to write")
    write_policy(args.out, environment_of(device), entries)
    for entry in entries:
        name, margin = entry.winner
        beaten = f", {margin:.2f} times as fast" if len(entry.us) > 1 else ", alone"
        print(f"{entry}: {name}{beaten}")
    if not gpu:
        print("Note: times of Triton's interpreter on a CPU: they say nothing about a GPU.")
    print(f"{args.out}: {len(entries)} cases; TRITONATTN_POLICY={args.out} uses it")
    return OK


def entries_of(frame: pd.DataFrame, num_layers: int) -> list[Entry]:
    """Return an entry for each case of a sweep in which a backend has a time.

    Parameters
    ----------
    frame : DataFrame
        In the columns of `tritonattn.perf.schema`, one variant of each case.
    num_layers : int
        Layers that share a plan.
    """
    entries = []
    timed = frame[frame["ms_p50"].notna()]
    for _, rows in timed.groupby("case", sort=False):
        plans = rows["plan_us"].fillna(0.0)
        times = rows["ms_p50"] * 1e3 + plans / num_layers
        first = rows.iloc[0]
        entries.append(
            Entry(
                op=op_of_lengths(int(first["max_q_len"])),
                dtype=str(first["dtype"]),
                head_dim=int(first["head_dim"]),
                num_qo_heads=int(first["num_qo_heads"]),
                num_kv_heads=int(first["num_kv_heads"]),
                batch_size=int(first["batch_size"]),
                kv_len=int(first["max_kv_len"]),
                us=dict(zip(rows["provider"], map(float, times), strict=True)),
            )
        )
    return entries
