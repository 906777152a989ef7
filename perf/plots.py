"""The pictures of a report, each as PNG and as SVG.

Ink (text, axes, grids) is drawn in one colour that nothing else has; in an SVG it becomes
`currentColor`, so that a page's dark or light mode reaches it. Widths suit a phone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from tritonattn.perf import summary, tables
from tritonattn.perf.text import NO_VALUE

INK = "#010203"
WIDTH = 4.5  # inches
OURS_COLOR, CEILING_COLOR = "#d55e00", "#8c8c8c"
# Okabe and Ito's colours, without black and without yellow, which white paper swallows.
COLORS = ("#0072b2", "#009e73", "#56b4e9", "#cc79a7", "#e69f00", "#8a63d2", "#999933")
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "p")
FASTER_COLOR, SLOWER_COLOR = "#0072b2", OURS_COLOR
MAX_LINE_PLOTS = 6  # of one op
MIN_LENGTHS = 3  # of a line
_RATIO_TICKS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 50)
# Any: its keys are a type of matplotlib's stubs.
_STYLE: Any = {
    "font.size": 10, "axes.titlesize": 11, "legend.fontsize": 9, "svg.fonttype": "none",
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK,
    "ytick.color": INK, "grid.color": INK, "grid.alpha": 0.15, "axes.grid": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "axes.axisbelow": True,
}  # fmt: skip


@dataclass(slots=True, frozen=True)
class Plot:
    """A picture."""

    name: str  # of a file, without its suffix
    title: str
    svg: str  # an element to put into a page
    png: bytes


@dataclass(slots=True, frozen=True)
class Line:
    """How a provider is drawn, the same in every picture of a report."""

    color: str
    marker: str
    style: str
    ours: bool

    def keywords(self) -> dict[str, Any]:
        """Return the arguments of `Axes.plot`."""
        weight = {"lw": 2.8, "ms": 6, "zorder": 4} if self.ours else {"lw": 1.3, "ms": 4.5}
        return {"color": self.color, "marker": self.marker, "ls": self.style, **weight}


def draw(sweeps: pd.DataFrame) -> list[Plot]:
    """Return all pictures that the rows of `summary.combine` are enough for."""
    rows = summary.cells(summary.timed(sweeps))
    with mpl.rc_context(_STYLE):
        return [_finish(name, title, figure) for name, title, figure in _figures(sweeps, rows)]


def _figures(sweeps: pd.DataFrame, rows: pd.DataFrame) -> Iterator[tuple[str, str, Figure]]:
    lines = line_styles(sweeps)
    ratios = summary.ratios(summary.sweep_ratios(sweeps))
    for op in rows["op"].unique():
        of_op = rows[rows["op"] == op]
        mode = summary.headline_mode(of_op)
        of_op = of_op[of_op["mode"] == mode]
        best = ratios[(ratios["against"] == summary.BEST_PEER) & (ratios["op"] == op)]
        best = best[best["mode"] == mode]
        if len(best):
            title = f"{op}: time ours / best peer, {mode}"
            names = tables.labels(sweeps[sweeps["op"] == op])
            yield _slug("ratio", op), title, ratio_bars(best, names, title)
        for facet, group in length_groups(of_op):
            title = f"{op} {facet}: latency, {mode}"
            yield _slug("latency", op, facet), title, latency_lines(group, lines, title)
            found = ratios.merge(group.drop_duplicates("case")[["case", "max_kv_len"]], on="case")
            found = found[(found["mode"] == mode) & found["l2"].isin(group["l2"])]
            found = found[found["role"] != "best"]
            if len(found):
                title = f"{op} {facet}: time ours / theirs, {mode}"
                yield _slug("by-length", op, facet), title, ratio_lines(found, lines, title)
    points = rows[(rows["tflops"] > 0) & (rows["gbps"] > 0)]
    points = points[points["mode"] == summary.headline_mode(points)]
    if len(points):
        points = points[points["l2"] == summary.l2_states(points)[0]]
        title = "Roofline" + _where(points)
        yield "roofline", title, roofline(points, summary.roofs(sweeps), lines, title)


def _where(rows: pd.DataFrame) -> str:
    return f", {rows['mode'].iat[0]}, {rows['l2'].iat[0]} L2"


def line_styles(sweeps: pd.DataFrame) -> dict[str, Line]:
    """Return how each provider is drawn: ours thick in its own colour, ceilings grey and dashed."""
    ours = summary.our_provider(sweeps)
    ceilings = set(sweeps.loc[sweeps["role"] == summary.CEILING, "provider"])
    timed = tables.providers(summary.timed(sweeps))
    others = [name for name in timed if name != ours]
    found = {}
    for i, name in enumerate(others):
        ceiling = name in ceilings
        style = "--" if ceiling else ":" if i >= len(COLORS) else "-"
        color = CEILING_COLOR if ceiling else COLORS[i % len(COLORS)]
        found[name] = Line(color, MARKERS[i % len(MARKERS)], style, False)
    return found if ours is None else {ours: Line(OURS_COLOR, "o", "-", True), **found}


def ratio_bars(best: pd.DataFrame, names: dict[str, str], title: str) -> Figure:
    """Draw a bar for each case and L2 state, from 1 to the ratio to the best peer."""
    cases, states = list(best["case"].unique()), summary.l2_states(best)
    figure, axes = _new(title, 0.9 + 0.46 * len(cases))
    low, high = min(0.8, best["low"].min()), max(1.25, best["high"].max())
    axes.set_xscale("log")
    axes.set_xlim(low / 1.1, high * 1.1)
    axes.set_ylim(len(cases) - 0.35, -0.6)
    axes.axvline(1, color=INK, lw=1)
    height = 0.5 / len(states)
    for place, case in enumerate(cases):
        rows = best[best["case"] == case].set_index("l2")
        for bar, state in enumerate(state for state in states if state in rows.index):
            row = rows.loc[state]
            color = FASTER_COLOR if row["ratio"] < 1 else SLOWER_COLOR
            y = place + (bar + 0.5) * height - 0.05
            alpha = 1.0 if state == states[0] else 0.45
            axes.barh(y, row["ratio"] - 1, height * 0.85, left=1, color=color, alpha=alpha)
            axes.plot([row["low"], row["high"]], [y, y], color=INK, lw=0.8)
        figures = " / ".join(
            f"{rows.loc[state, 'ratio']:.2f}" if state in rows.index else NO_VALUE
            for state in states
        )
        across = axes.get_yaxis_transform()
        style: dict[str, Any] = {"transform": across, "va": "center", "fontsize": 8.5}
        axes.text(0, place - 0.25, f" {names[case]}", ha="left", **style)
        axes.text(1, place - 0.25, figures, ha="right", **style)
    _ratio_axis(axes, "x")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    pale = f", {states[1]} below it, paler" if len(states) > 1 else ""
    axes.set_xlabel(f"{states[0]} L2{pale}; left of 1: ours is faster")
    return figure


def length_groups(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return groups of cases that differ in their length only, with what they have in common.

    Only batches of equal requests count: others have no one length. Rows are of the first L2 state.
    """
    rows = rows[rows["l2"] == summary.l2_states(rows)[0]]
    even = (rows["total_kv"] == rows["batch_size"] * rows["max_kv_len"]) & (
        rows["total_q"] == rows["batch_size"] * rows["max_q_len"]
    )
    rows = rows[even.fillna(False)]
    whole = rows["max_q_len"] == rows["max_kv_len"]
    rows = rows.assign(queries=rows["max_q_len"].astype("string").mask(whole, "all"))
    by = ["model", "batch_size", "queries", "page_size", "kv_layout", "dtype", "causal", "features"]
    found = []
    for key, group in rows.groupby(by, dropna=False, sort=False):
        if group["max_kv_len"].nunique() >= MIN_LENGTHS:
            model, batch, queries, *_ = key
            facet = f"{model} batch {batch}" + (f" q {queries}" if queries not in "1 all" else "")
            found.append((facet, group))
    found.sort(key=lambda pair: -pair[1]["max_kv_len"].nunique())
    names = [facet for facet, _ in found]
    return [
        (f"{facet} ({names[:i].count(facet) + 1})" if names.count(facet) > 1 else facet, group)
        for i, (facet, group) in enumerate(found)
    ][:MAX_LINE_PLOTS]


def latency_lines(rows: pd.DataFrame, lines: dict[str, Line], title: str) -> Figure:
    """Draw µs by the length of the keys, a line for each provider."""
    figure, axes = _new(title + f", {rows['l2'].iat[0]} L2", 4.6)
    for name, group in _by_provider(rows, "provider", lines):
        axes.plot(group["max_kv_len"].astype(float), group["ms_p50"].astype(float) * 1e3,
                  label=name, **lines[name].keywords())  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("µs per call")
    _length_axis(axes, rows)
    _legend(figure, axes)
    return figure


def ratio_lines(rows: pd.DataFrame, lines: dict[str, Line], title: str) -> Figure:
    """Draw time ours / time theirs by the length of the keys, a line for each of the others."""
    figure, axes = _new(title + f", {rows['l2'].iat[0]} L2", 4.6)
    axes.axhline(1, color=INK, lw=1)
    for name, group in _by_provider(rows, "against", lines):
        x = group["max_kv_len"].astype(float)
        axes.plot(x, group["ratio"], label=name, **lines[name].keywords())
        axes.fill_between(x, group["low"], group["high"], color=lines[name].color, alpha=0.2, lw=0)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.8), max(high, 1.25))
    _ratio_axis(axes, "y")
    axes.set_ylabel("below 1: ours is faster")
    _length_axis(axes, rows)
    _legend(figure, axes)
    return figure


def roofline(rows: pd.DataFrame, roofs: pd.DataFrame, lines: dict[str, Line], title: str) -> Figure:
    """Draw TFLOPS by FLOPs per byte under the roofs that were measured."""
    figure, axes = _new(title, 4.8)
    rows = rows.assign(intensity=rows["tflops"] * 1e3 / rows["gbps"])
    for name, group in _by_provider(rows, "provider", lines, "intensity"):
        style = lines[name].keywords() | {"ls": "", "alpha": 0.9}
        axes.plot(group["intensity"].astype(float), group["tflops"].astype(float),
                  label=name, **style)  # fmt: skip
    low, high = float(rows["intensity"].min()) / 1.5, float(rows["intensity"].max()) * 1.5
    read, matmul = (roofs[name].median() for name in ("roof_read_gbps", "roof_matmul_tflops"))
    if not pd.isna(read) and not pd.isna(matmul):
        ridge = matmul * 1e3 / read
        high = max(high, ridge * 3)
        axes.plot([low, ridge, high], [low * read / 1e3, matmul, matmul], color=INK, lw=1.2)
        axes.annotate(f"{matmul:.0f} TFLOPS", (high, matmul), (0, 3), ha="right",
                      textcoords="offset points", fontsize=9)  # fmt: skip
        middle = (low * ridge) ** 0.5
        axes.annotate(f"{read:.0f} GB/s", (middle, middle * read / 1e3), (-6, 4), ha="right",
                      textcoords="offset points", fontsize=9)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte")
    axes.set_ylabel("TFLOPS")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _legend(figure, axes)
    return figure


def _by_provider(
    rows: pd.DataFrame, column: str, lines: dict[str, Line], x: str = "max_kv_len"
) -> Iterator[tuple[str, pd.DataFrame]]:
    for name in lines:
        group = rows[rows[column] == name].sort_values(x)
        if len(group):
            yield name, group


def _new(title: str, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, wrap=True)
    return figure, axes


def _ratio_axis(axes: Axes, which: str) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    ticks: Sequence[float] = [tick for tick in _RATIO_TICKS if low <= tick <= high]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _length_axis(axes: Axes, rows: pd.DataFrame) -> None:
    lengths = sorted(rows["max_kv_len"].astype(int).unique())
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([float(length) for length in lengths]))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 and n % 1024 == 0 else f"{n:g}")
    )
    axes.set_xlabel("key tokens per request")


def _legend(figure: Figure, axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=3, columnspacing=1.0,
                  handlelength=1.8)  # fmt: skip


def _slug(*parts: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(parts).lower()).strip("-.")


def _finish(name: str, title: str, figure: Figure) -> Plot:
    picture, drawing = io.BytesIO(), io.StringIO()
    figure.savefig(picture, format="png", dpi=150, facecolor="white")
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(drawing, format="svg", transparent=True, metadata={"Date": None})
    return Plot(name, title, _inline(drawing.getvalue(), name), picture.getvalue())


def _inline(svg: str, name: str) -> str:
    """Return an SVG file's element: sized by the page, ids its own, ink in the page's colour."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r' id="', f' id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    return svg.replace(INK, "currentColor")
