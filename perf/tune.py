"""`tritonattn tune`: measure which backend is faster where on this GPU, and write the policy.

Ours and each of FlashInfer's kernels run the cases of a suite by the way that dispatch takes, in
CUDA graphs with a cold L2 cache; decode as the graphs of a stage hold it. A plan, shared by the
layers of a step, counts with its share of a layer. `--check` measures all of them once more, beside
what "auto" makes of the policy.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tritonattn import dispatch
from tritonattn.backends import FLASHINFER_KERNELS
from tritonattn.cli import OK, UsageError, need
from tritonattn.perf.suites import SUITES, tiny
from tritonattn.policy import Entry, environment_of, op_of_lengths, read_policy, write_policy

if TYPE_CHECKING:
    import pandas as pd
    import torch

# "auto" must be able to take any call, and XQA gives no LSE.
BACKENDS = ("triton", *(name for name in FLASHINFER_KERNELS if name != "flashinfer:xqa"))
AUTO = "auto"
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
    parser.add_argument(
        "--check",
        type=Path,
        metavar="DIR",
        help="measure again with the policy in use; the results are left in DIR",
    )


def run(args: argparse.Namespace) -> int:
    """Sweep the backends, write the policy and say what it says."""
    import torch

    for package in ("pandas", "pyarrow"):
        need(package, "perf")
    if args.layers < 1:
        raise UsageError(f"--layers must be at least 1, got {args.layers}")
    name, by = dispatch.asked()
    if name != AUTO:
        raise UsageError(f"{by} asks for {name}: a policy serves calls that are free to choose")
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    if gpu:
        device = torch.empty(0, device=device).device
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory(prefix="tritonattn-tune-") as folder:
        frame = _measure(args, device, BACKENDS, Path(folder))
    entries = entries_of(frame, args.layers)
    if not entries:
        raise UsageError("no backend could be measured in any case: nothing to write")
    write_policy(args.out, environment_of(device), entries)
    for entry in entries:
        name, margin = entry.winner
        beaten = f", {margin:.2f} times as fast" if len(entry.us) > 1 else ", alone"
        print(f"{entry}: {name}{beaten}")
    print(f"{args.out}: {len(entries)} cases; TRITONATTN_POLICY={args.out} uses it")
    if args.check is not None:
        _check(args, device)
    if not gpu:
        print("Note: times of Triton's interpreter on a CPU: they say nothing about a GPU.")
    return OK


def _measure(
    args: argparse.Namespace, device: torch.device, backends: Sequence[str], folder: Path
) -> pd.DataFrame:
    from tritonattn.perf import timing
    from tritonattn.perf.providers.ours import through
    from tritonattn.perf.sweep import Settings, sweep

    gpu = device.type == "cuda"
    effort = timing.QUICK if args.quick else timing.FULL
    settings = Settings(
        suite=args.suite,
        cases=SUITES[args.suite]() if gpu else tiny(args.suite),
        providers=[through(name) for name in backends],
        variants=[("graph", "cold")] if gpu else [("eager", "warm")],
        device=device,
        effort=effort if gpu else timing.INTERPRETED,
        budget_s=None,
    )
    return sweep(settings, folder, fresh=True)


def _check(args: argparse.Namespace, device: torch.device) -> None:
    """Measure "auto" with the policy beside the backends, and say what it loses to the best."""
    before = dispatch.installed_policy()
    dispatch.install_policy(read_policy(args.out))
    try:
        frame = _measure(args, device, (*BACKENDS, AUTO), args.check)
    finally:
        dispatch.install_policy(before)
    lost = lost_by_auto(entries_of(frame, args.layers))
    if not lost:
        raise UsageError("auto could be measured beside no other backend")
    geomean = math.exp(sum(math.log(ratio) for ratio, _ in lost) / len(lost))
    worst, where = max(lost)
    print(f"auto with {args.out}: {geomean:.3f} times the time of each case's best backend, "
          f"at worst {worst:.3f}, in {where}")  # fmt: skip


def lost_by_auto(entries: Sequence[Entry]) -> list[tuple[float, str]]:
    """Return the time of "auto" over the best backend's in each case, and the case."""
    lost = []
    for entry in entries:
        others = [us for name, us in entry.us.items() if name != AUTO]
        if AUTO in entry.us and others:
            lost.append((entry.us[AUTO] / min(others), str(entry)))
    return lost


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
