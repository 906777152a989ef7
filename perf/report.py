"""Write a report of sweeps: report.md, report.html and a PNG for each picture.

RESULT is a results.csv or .parquet file, a folder with results.csv, or a folder of such folders.
Of several sweeps of a suite the report shows the median of each ratio, taken within one sweep, with
its lowest and highest. The ratio is time ours / time of the other: below 1, ours is faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tritonattn.cli import OK, UsageError, need

if TYPE_CHECKING:
    import pandas as pd

PACKAGES = ("pandas", "pyarrow", "matplotlib", "tabulate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("results", metavar="RESULT", nargs="+", type=Path, help="what a sweep left")
    parser.add_argument("--out", metavar="DIR", type=Path, help="default: beside the first RESULT")
    parser.add_argument(
        "--markdown", metavar="FILE", type=Path, help="write the tables to this file, nothing else"
    )


def run(args: argparse.Namespace) -> int:
    """Write the report and print the top of it."""
    for package in PACKAGES:
        need(package, "perf")
    from tritonattn.perf import load, markdown, summary

    try:
        sweeps = summary.combine(load.read_sweeps(args.results))
    except ValueError as error:
        raise UsageError(str(error)) from error
    first = args.results[0]
    folder = args.out or (first if first.is_dir() else first.parent)
    try:
        if args.markdown:
            args.markdown.parent.mkdir(parents=True, exist_ok=True)
            args.markdown.write_text(markdown.report(sweeps), encoding="utf-8")
            return OK
        write(sweeps, folder)
    except OSError as error:
        raise UsageError(f"the report cannot be written: {error}") from error
    print(markdown.headline(sweeps))
    print(f"Report: {folder / 'report.html'}, {folder / 'report.md'}")
    return OK


def markdown(frames: Sequence[pd.DataFrame], images: Mapping[str, str] | None = None) -> str:
    """Return the report of some results as Markdown.

    Parameters
    ----------
    frames : sequence of DataFrame
        Tables of sweeps, as `schema.read_results` returns them.
    images : mapping of str to str, optional
        File name to title of the pictures to show.
    """
    from tritonattn.perf import markdown, summary

    return markdown.report(summary.combine(frames), images)


def write(sweeps: pd.DataFrame, folder: Path) -> None:
    """Write all files of the report of what `summary.combine` returns."""
    from tritonattn.perf import markdown, page, plots

    pictures = plots.draw(sweeps)
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        (folder / f"{picture.name}.png").write_bytes(picture.png)
    images = {f"{picture.name}.png": picture.title for picture in pictures}
    (folder / "report.md").write_text(markdown.report(sweeps, images), encoding="utf-8")
    (folder / "report.html").write_text(page.html(sweeps, pictures), encoding="utf-8")
