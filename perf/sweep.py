"""`tritonattn sweep`: measure a suite of cases with every provider, into a folder of results.

Each row is on disk as soon as it exists. The same command in the same folder goes on where it was
stopped; `--fresh` begins anew. On a CPU the kernels run in Triton's interpreter, on tiny cases:
that tries the way from a case to a report, its times mean nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritonattn.cli import FAILED, OK, RestartError, UsageError, need
from tritonattn.perf.suites import SUITES, tiny

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from tritonattn.perf.cases import Case
    from tritonattn.perf.measure import Row, Variant
    from tritonattn.perf.providers import Provider
    from tritonattn.perf.timing import Effort


@dataclass(frozen=True, slots=True)
class Settings:
    """What a sweep measures and how."""

    suite: str
    cases: list[Case]
    providers: list[Provider]
    variants: list[Variant]  # of those that a case has
    device: torch.device
    effort: Effort
    budget_s: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--suite", choices=tuple(SUITES), default="decode", help="cases; default: decode"
    )
    what.add_argument("--cases", type=Path, metavar="FILE", help="own cases, YAML or JSON")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="folder of results; default: sweeps/SUITE")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer samples of each case")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this text")
    parser.add_argument(
        "--providers", nargs="+", metavar="NAME", help="of those known; all by default"
    )
    parser.add_argument("--plugin", nargs="+", default=[], metavar="MODULE",
                        help="modules that register providers")  # fmt: skip
    parser.add_argument("--mode", nargs="+", choices=("graph", "eager"))
    parser.add_argument("--l2", nargs="+", choices=("cold", "warm"))
    parser.add_argument("--budget", type=float, metavar="SECONDS",
                        help="begin no case after this time; the next run goes on")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="drop the results that are there")
    parser.add_argument("--device", help="cuda, cuda:N or cpu")


def run(args: argparse.Namespace) -> int:
    """Sweep, then print the summary."""
    for package in ("pandas", "pyarrow", "tabulate"):
        need(package, "perf")
    from tritonattn.perf import markdown, schema, summary

    settings = _settings(args)
    out = args.out or Path("sweeps") / settings.suite
    frame = sweep(settings, out, fresh=args.fresh)
    print(markdown.overview(summary.combine([frame])))
    print(f"\n{out / schema.RESULTS_CSV}: {len(frame)} rows; for a page: tritonattn report {out}")
    # Unsupported is an answer, and so is a budget that was spent.
    bad = frame["status"].isin([schema.WRONG, schema.FAILED, schema.OUT_OF_MEMORY]).any()
    return FAILED if bad else OK


def _settings(args: argparse.Namespace) -> Settings:
    import torch

    from tritonattn.perf import cases, providers, timing

    device = torch.device(args.device)
    gpu = device.type == "cuda"
    if gpu and device.index is not None:
        # Events, streams and graphs are those of the current device.
        torch.cuda.set_device(device)
    if args.cases is None:
        chosen = SUITES[args.suite]() if gpu else tiny(args.suite)
    else:
        try:
            chosen = cases.load_cases(args.cases)
        except (OSError, ValueError) as error:
            raise UsageError(str(error)) from error
    chosen = [case for case in chosen if args.only in case.name]
    if not chosen:
        raise UsageError(f"no case has {args.only!r} in its name")
    try:
        known = providers.all_providers(args.plugin)
    except (ImportError, ValueError) as error:
        raise UsageError(f"a module of providers cannot be used: {error}") from error
    unknown = sorted(set(args.providers or ()) - set(known))
    if unknown:
        raise UsageError(f"there is no provider {', '.join(unknown)}: known are {', '.join(known)}")
    kinds = {providers.kind_of(case) for case in chosen}
    useful = [name for name, provider in known.items() if kinds & provider.kinds]
    effort = timing.QUICK if args.quick else timing.FULL
    return Settings(
        suite=args.suite if args.cases is None else _suite_of(args.cases),
        cases=chosen,
        providers=[known[name] for name in dict.fromkeys(args.providers or useful)],
        variants=[(mode, l2) for mode in args.mode or ("graph", "eager")
                  for l2 in args.l2 or ("cold", "warm")],
        device=device,
        effort=effort if gpu else timing.INTERPRETED,
        budget_s=args.budget,
    )  # fmt: skip


def _suite_of(path: Path) -> str:
    """Name the cases of a file; other contents are another suite."""
    return f"{path.stem}-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"


def sweep(settings: Settings, out: Path, *, fresh: bool = False) -> pd.DataFrame:
    """Measure what a folder of results lacks.

    Parameters
    ----------
    settings : Settings
    out : Path
        Gets `results.csv`, row by row, and `results.parquet` at the end.
    fresh : bool
        Drop the rows that are there.

    Returns
    -------
    pandas.DataFrame
        All rows, in the columns of `tritonattn.perf.schema`.

    Raises
    ------
    UsageError
        If the folder holds rows of another environment, or no case has what is asked for.
    """
    from tritonattn.perf import schema
    from tritonattn.perf.environment import environment
    from tritonattn.perf.measure import measure_case
    from tritonattn.perf.roofs import measure_roofs

    tqdm = need("tqdm", "perf").tqdm
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"results cannot go to {out}: {error}") from error
    facts = environment(settings.device)
    file = out / schema.RESULTS_CSV
    facts |= {"suite": settings.suite, "effort": settings.effort.name}
    run_id, done = _kept(file, facts, fresh)
    todo = _todo(settings, done)
    if not todo and not done:
        raise UsageError(
            f"none of the cases can be measured on {settings.device} in the modes and L2 states "
            f"asked for: {', '.join(map(' '.join, settings.variants))}"
        )
    roofs = measure_roofs(settings.device) if todo else None
    begin = time.monotonic()
    # Without a terminal there is no line to draw it on.
    bar = tqdm(todo, unit="case", desc=settings.suite, disable=None)
    for case, wanted in bar:
        bar.set_postfix_str(case.name)
        late = settings.budget_s is not None and time.monotonic() - begin > settings.budget_s
        if late:
            rows = _not_run(case, wanted)
        else:
            assert roofs is not None
            rows = measure_case(case, wanted, settings.device, settings.effort, roofs)
        common = {"run_id": run_id, **facts}
        if roofs is not None:
            common |= {f"roof_{name}": value for name, value in asdict(roofs).items()}
        _write(file, common, rows)
    frame = schema.read_results(file)
    schema.write_results(out, frame)
    return frame


def _write(file: Path, common: Row, rows: Iterator[Row]) -> None:
    """Append rows; start over in a new process if the GPU is lost to this one."""
    from tritonattn.perf import schema
    from tritonattn.perf.measure import DeviceLostError

    try:
        for row in rows:
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            schema.append_row(file, common | {"timestamp": now} | row)
    except DeviceLostError as error:
        raise RestartError(f"the GPU was lost ({error}); the same command goes on") from error


def _kept(file: Path, facts: dict[str, Any], fresh: bool) -> tuple[str, set[tuple[Any, ...]]]:
    """Return the run's id and the keys of the rows that need not be measured again."""
    from tritonattn.perf import schema

    if fresh:
        file.unlink(missing_ok=True)
        (file.parent / schema.RESULTS_PARQUET).unlink(missing_ok=True)
    if file.exists():
        schema.drop_torn_line(file)
    if not file.exists() or file.stat().st_size == 0:
        return uuid.uuid4().hex[:12], set()
    try:
        frame = schema.read_results(file)
    except ValueError as error:
        raise UsageError(f"{error}; --fresh drops it") from error
    frame = frame[frame["status"] != schema.NOT_RUN]
    if frame.empty:
        file.unlink()
        return uuid.uuid4().hex[:12], set()
    _check_same(file, frame, facts)
    schema.write_results(file.parent, frame)
    keys = frame[list(schema.KEY)].itertuples(index=False, name=None)
    return str(frame["run_id"].iloc[0]), set(keys)


def _check_same(file: Path, frame: pd.DataFrame, facts: dict[str, Any]) -> None:
    """Refuse to go on with rows that are not of this suite, effort and environment."""
    from tritonattn.perf import schema

    here = schema.to_frame([facts]).iloc[0].astype("string").fillna("nothing")
    there = frame.astype("string").fillna("nothing")
    for name in facts:
        # Results that are committed make their own checkout dirty.
        other = there.loc[there[name] != here[name], name]
        if name != "git_dirty" and len(other):
            raise UsageError(
                f"{file} was measured with {name} {other.iloc[0]}, here it is {here[name]}: take "
                "another --out, or --fresh to drop it"
            )


def _todo(
    settings: Settings, done: set[tuple[Any, ...]]
) -> list[tuple[Case, dict[Variant, list[Provider]]]]:
    from tritonattn.perf.measure import variants_of

    todo = []
    for case in settings.cases:
        wanted: dict[Variant, list[Provider]] = {}
        for variant in variants_of(case, settings.device):
            if variant not in settings.variants:
                continue
            missing = [p for p in settings.providers if (case.name, p.name, *variant) not in done]
            if missing:
                wanted[variant] = missing
        if wanted:
            todo.append((case, wanted))
    return todo


def _not_run(case: Case, wanted: dict[Variant, list[Provider]]) -> Iterator[Row]:
    from tritonattn.perf import schema
    from tritonattn.perf.measure import describe

    for variant, providers in wanted.items():
        for provider in providers:
            yield describe(case, provider, variant) | {
                "status": schema.NOT_RUN,
                "reason": "the time budget was spent",
            }


if __name__ == "__main__":
    import sys

    from tritonattn.cli import main

    sys.argv.insert(1, "sweep")
    sys.exit(main())
