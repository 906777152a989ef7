"""The report as one HTML page, which needs no other file and no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import pandas as pd

from tritonattn.perf import markdown, summary, tables
from tritonattn.perf.page_template import PAGE, SCRIPT, STYLE
from tritonattn.perf.plots import Plot
from tritonattn.perf.text import Cell, Column, Table

_WRAPPED = ("reason", "cases")


def html(sweeps: pd.DataFrame, plots: Sequence[Plot] = ()) -> str:
    """Return the page of what `summary.combine` returns, with pictures."""
    ops = [op for op in sweeps["op"].unique() if len(summary.timed(sweeps[sweeps["op"] == op]))]
    rest = [tables.geomeans, tables.worst, tables.best, tables.host_costs]
    rest += [tables.roofs, tables.missing]
    return PAGE.substitute(
        title=escape(markdown.title(sweeps)),
        style=STYLE,
        script=SCRIPT,
        notes="\n".join(f'<p class="note">{escape(note)}</p>' for note in tables.notes(sweeps)),
        explained=escape(markdown.explain_ratios(sweeps)),
        tiles="\n".join(_tiles(sweeps)),
        headline=_section(tables.headline(sweeps)),
        times="\n".join(_section(tables.times(sweeps, op)) for op in ops),
        plots=_plots(plots),
        tables="\n".join(_section(view(sweeps)) for view in rest),
        rows=_table(tables.every_row(sweeps), ' id="every-row"'),
        environment="\n".join(
            f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
            for name, value in tables.environment(sweeps)
        ),
    )


def _tiles(sweeps: pd.DataFrame) -> Iterable[str]:
    """Yield the headline numbers: ours against the best of each row, and of FlashInfer's paths."""
    means = summary.in_reading_order(summary.geomeans(sweeps).assign(op=""))
    means = means[means["mode"] == summary.headline_mode(sweeps)]
    for against in (summary.BEST_PEER, summary.BEST_FLASHINFER):
        for row in means[means["against"] == against].itertuples():
            where = f"{row.mode}, {row.l2} L2; faster in {row.faster} of {row.rows} cases"
            yield (
                f'<div class="tile"><b>{row.geomean:.3f}</b>'
                f"<span>geomean time ratio to the {escape(against)}</span>"
                f"<span>{escape(where)}</span></div>"
            )


def _plots(plots: Sequence[Plot]) -> str:
    if not plots:
        return ""
    figures = "\n".join(
        f'<figure id="plot-{escape(plot.name)}" role="img" aria-label="{escape(plot.title)}">'
        f"{plot.svg}</figure>"
        for plot in plots
    )
    return f'<h2>Plots</h2>\n<div class="plots">{figures}</div>'


def _section(table: Table) -> str:
    if not table.rows:
        return ""
    note = f'<p class="soft">{escape(table.note)}</p>' if table.note else ""
    return f"<h2>{escape(table.title)}</h2>{note}{_table(table)}"


def _table(table: Table, attributes: str = "") -> str:
    heads = "".join(_head(column) for column in table.columns)
    rows = "\n".join(
        f'<tr data-i="{number}">'
        + "".join(_cell(column, cell) for column, cell in zip(table.columns, row, strict=True))
        + "</tr>"
        for number, row in enumerate(table.rows)
    )
    return (
        f'<div class="box" tabindex="0"><table{attributes}><thead><tr>{heads}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _head(column: Column) -> str:
    numeric = ' class="n"' if column.numeric else ""
    return (
        f'<th data-key="{escape(column.key)}"{numeric}>'
        f"<button{numeric}>{escape(column.title)}</button></th>"
    )


def _cell(column: Column, cell: Cell) -> str:
    kind = ' class="n"' if column.numeric else ' class="wrap"' if column.key in _WRAPPED else ""
    value = "" if cell.value is None else f' data-v="{cell.value!r}"'
    text = f"<b>{escape(cell.text)}</b>" if cell.strong else escape(cell.text)
    return f"<td{kind}{value}>{text}</td>"
