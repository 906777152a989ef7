"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from tritonattn.perf import summary, tables
from tritonattn.perf.text import Table

RATIO = "Ratio = time ours / time of the other: below 1, ours is faster."


def title(sweeps: pd.DataFrame) -> str:
    """Return what was swept, and on what."""
    facts = dict(tables.environment(sweeps))
    gpu = "Triton's interpreter" if facts.get("device") == "interpreter" else facts.get("gpu", "")
    return f"Sweep {facts.get('suite', '')}".strip() + (f" on {gpu}" if gpu else "")


def explain_ratios(sweeps: pd.DataFrame) -> str:
    """Return what a ratio is, and what becomes of several sweeps."""
    count = sweeps["sweep"].nunique()
    if count < 2:
        return RATIO
    return (
        f"{RATIO} Each is taken within one sweep; shown is the median of {count} sweeps "
        "[lowest, highest]."
    )


def headline(sweeps: pd.DataFrame) -> str:
    """Return the top of the report: what, where, how to read it, and the geomeans."""
    parts = [f"# {title(sweeps)}"]
    parts += [f"> **Note:** {_escape(note)}" for note in tables.notes(sweeps)]
    facts = ", ".join(f"{name} {value}" for name, value in tables.environment(sweeps))
    parts += [_escape(facts), explain_ratios(sweeps)] if facts else []
    means = tables.headline(sweeps)
    return "\n\n".join(parts + ([_section(means)] if means.rows else [])) + "\n"


def overview(sweeps: pd.DataFrame) -> str:
    """Return what a terminal shows when a sweep ends: the top, the worst cells, what is missing."""
    tables_shown = [tables.worst(sweeps), tables.missing(sweeps)]
    return "\n\n".join([headline(sweeps), *(_section(t) for t in tables_shown if t.rows)])


def report(sweeps: pd.DataFrame, images: Mapping[str, str] | None = None) -> str:
    """Return the whole report.

    Parameters
    ----------
    sweeps : DataFrame
        What `summary.combine` returns.
    images : mapping of str to str, optional
        File name to title of the pictures to show.
    """
    ops = [op for op in sweeps["op"].unique() if len(summary.timed(sweeps[sweeps["op"] == op]))]
    sections = [tables.times(sweeps, op) for op in ops]
    sections += [tables.geomeans(sweeps), tables.worst(sweeps), tables.best(sweeps)]
    sections += [tables.host_costs(sweeps), tables.roofs(sweeps), tables.missing(sweeps)]
    parts = [headline(sweeps), *(_section(table) for table in sections if table.rows)]
    if images:
        shown = [f"![{_escape(text)}]({name})" for name, text in images.items()]
        parts.append("\n\n".join(["## Plots", *shown]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _section(table: Table) -> str:
    parts = [f"## {_escape(table.title)}", _escape(table.note), render(table)]
    return "\n\n".join(part for part in parts if part)


def render(table: Table) -> str:
    """Return a table without its title."""
    rows = [
        [f"**{_escape(cell.text)}**" if cell.strong else _escape(cell.text) for cell in row]
        for row in table.rows
    ]
    frame = pd.DataFrame(rows, columns=[_escape(column.title) for column in table.columns])
    align = ["right" if column.numeric else "left" for column in table.columns]
    # Figures are text already: tabulate must not read and print them anew.
    return str(frame.to_markdown(index=False, disable_numparse=True, colalign=align))


def _escape(text: str) -> str:
    for character in "\\|*`":
        text = text.replace(character, f"\\{character}")
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("](", "]\\(")
    return " ".join(text.split())
