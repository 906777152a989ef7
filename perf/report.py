"""Print the committed measurements as Markdown: `python -m tritonattn.perf.report`.

`docs/performance.md` contains these tables as they are printed; a test compares them.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

RESULTS = Path(__file__).parent / "results"
# Columns that are the same in every row are said once, above the table.
ENVIRONMENT = ("mode", "l2", "gpu", "driver", "torch", "triton", "python")


def table(file: Path) -> str:
    """Return one file as a Markdown table under a line with its environment."""
    frame = pd.read_csv(file)
    environment = [name for name in ENVIRONMENT if name in frame]
    facts = ", ".join(f"{name} {frame[name].iloc[0]}" for name in environment)
    frame = frame.drop(columns=environment)
    lines = ["| " + " | ".join(frame.columns) + " |", "|" + "---|" * len(frame.columns)]
    for row in frame.itertuples(index=False):
        lines.append("| " + " | ".join(_cell(value) for value in row) + " |")
    return f"`perf/results/{file.name}`: {facts}\n\n" + "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "" if pd.isna(value) else f"{value:.4g}" if value < 10 else f"{value:.1f}"
    return str(value)


def main() -> None:
    """Print all tables."""
    for file in sorted(RESULTS.glob("*.csv")):
        print(table(file))


if __name__ == "__main__":
    main()
