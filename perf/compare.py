"""Compare sweeps: what got slower or faster beyond the noise seen, what stopped being ok.

BASE and NEW are each a results.csv or .parquet file, a folder with results.csv, or a folder of such
folders (several runs). Or sweep another commit and this checkout in turns, the commit in a
temporary worktree: `tritonattn compare --commit REV --suite NAME --out DIR`.

Exit status: 1 if a row got slower beyond the noise or stopped being ok, else 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tritonattn.cli import FAILED, OK, UsageError, need

if TYPE_CHECKING:
    import pandas as pd

    from tritonattn.perf.text import Table

MAX_LISTED = 40  # rows of one kind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("base", metavar="BASE", nargs="?", type=Path, help="results before")
    parser.add_argument("new", metavar="NEW", nargs="?", type=Path, help="results after")
    commit = parser.add_argument_group("against a commit")
    commit.add_argument(
        "--commit", metavar="REV", help="what to sweep as BASE; NEW is this checkout"
    )
    commit.add_argument("--suite", metavar="NAME", help="the suite to sweep")
    commit.add_argument("--quick", action="store_true", help="sweep quickly")
    commit.add_argument("--repeats", type=int, metavar="N", help="sweeps of each side (default: 3)")
    commit.add_argument("--out", metavar="DIR", type=Path, help="folder for the sweeps' results")


def run(args: argparse.Namespace) -> int:
    """Print what changed."""
    _check(args)
    for package in ("pandas", "pyarrow", "tabulate"):
        need(package, "perf")
    from tritonattn.perf import changes, load

    try:
        base_at, new_at = _sweep(args) if args.commit else (args.base, args.new)
        base, new = load.read_sweeps([base_at]), load.read_sweeps([new_at])
    except ValueError as error:
        raise UsageError(str(error)) from error
    table = changes.compare(base, new)
    print(text(table, changes.environments(base, new), changes.machine(base, new)))
    return FAILED if table["verdict"].isin(changes.REGRESSIONS).any() else OK


def compare(
    base_frames: Sequence[pd.DataFrame], new_frames: Sequence[pd.DataFrame]
) -> pd.DataFrame:
    """Compare two sets of sweeps row by row: see `changes.compare`."""
    from tritonattn.perf import changes

    return changes.compare(base_frames, new_frames)


def _check(args: argparse.Namespace) -> None:
    options = {name: getattr(args, name) for name in ("suite", "quick", "repeats", "out")}
    given = [f"--{name}" for name, value in options.items() if value not in (None, False)]
    if args.commit is None:
        if given:
            raise UsageError(f"{', '.join(given)} can only be used with --commit")
        if args.new is None:
            raise UsageError("give BASE and NEW, or --commit REV --suite NAME --out DIR")
        return
    if args.base is not None:
        raise UsageError(f"give either BASE and NEW or --commit, got {args.base} and --commit")
    if args.suite is None or args.out is None:
        raise UsageError("--commit needs --suite NAME and --out DIR")
    if args.repeats is not None and args.repeats < 1:
        raise UsageError(f"--repeats must be at least 1, got {args.repeats}")


def _sweep(args: argparse.Namespace) -> tuple[Path, Path]:
    from tritonattn.perf import commits

    options = ["--suite", args.suite, *(["--quick"] if args.quick else [])]
    try:
        return commits.sweep_in_turns(args.commit, options, args.out, args.repeats or 3)
    except commits.SweepError as error:
        raise UsageError(str(error)) from error


def text(table: pd.DataFrame, environments: Sequence[str], machine: dict[str, float]) -> str:
    """Return a comparison as Markdown: how it was made, the counts, and the rows that changed."""
    from tritonattn.perf import changes
    from tritonattn.perf.markdown import render
    from tritonattn.perf.text import Cell, Column, Table

    parts = ["Ratio = time new / time base: below 1, new is faster."]
    parts += [f"The environments differ in {line}" for line in environments]
    if machine:
        roofs = ", ".join(f"{name} {value:.3f}" for name, value in machine.items())
        parts.append(f"The machine itself, new / base: {roofs}")
    if (table[["runs_base", "runs_new"]] == 1).any(axis=None):
        parts.append("Of rows with one run on a side, the noise between runs was not seen.")
    ours = table["role"] == "ours"
    counts = Table("", [Column("verdict", "verdict"), Column("ours", "ours", True),
                        Column("others", "others", True)])  # fmt: skip
    for verdict in changes.VERDICTS:
        rows = table["verdict"] == verdict
        if rows.any():
            pair = [str(int((rows & mine).sum())) for mine in (ours, ~ours)]
            counts.rows.append([Cell(verdict), *map(Cell, pair)])
    parts.append(render(counts) if counts.rows else "There are no rows to compare.")
    for verdict in changes.VERDICTS[:-2]:
        rows = table[table["verdict"] == verdict]
        if len(rows):
            parts.append(f"## {verdict}\n\n{render(_listed(rows, verdict))}")
            rest = len(rows) - MAX_LISTED
            parts += [f"and {rest} more rows"] if rest > 0 else []
    return "\n\n".join(parts)


def _listed(rows: pd.DataFrame, verdict: str) -> Table:
    from tritonattn.perf import changes
    from tritonattn.perf.text import Cell, Column, Table, microseconds

    names = ("case", "provider", "mode", "l2")
    timed = verdict in (changes.SLOWER, changes.FASTER)
    figures = ("ratio", "noise", "base µs", "new µs") if timed else ()
    sides = () if timed else ("base", "new")
    columns = [Column(name, name, name in figures) for name in (*names, *figures, *sides)]
    table = Table(verdict, columns)
    for row in rows.head(MAX_LISTED).to_dict("records"):
        line = [Cell(str(row[name])) for name in names]
        if timed:
            line += [Cell(f"{row['ratio']:.3f}"), Cell(f"{row['noise']:.1%}")]
            line += [Cell(microseconds(row["ms_base"])), Cell(microseconds(row["ms_new"]))]
        table.rows.append(line + [Cell(_status(row, side)) for side in sides])
    return table


def _status(row: dict[str, object], side: str) -> str:
    status, reason = row[f"status_{side}"], row[f"reason_{side}"]
    # A missing value is not equal to itself, or says so of nothing: only text counts.
    known = [value for value in (status, reason) if isinstance(value, str) and value]
    return ": ".join(known)
