"""The tables of a report: Markdown and HTML show the same ones."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from tritonattn.perf import schema, summary
from tritonattn.perf.text import NO_VALUE, Cell, Column, Table, interval, microseconds, number


def labels(sweeps: pd.DataFrame) -> dict[str, str]:
    """Return short names of the cases of one op, or the full ones where short ones are not unique.

    A short name is the model and the lengths, and what differs between the cases.
    """
    cases = sweeps.drop_duplicates("case")
    columns = ["page_size", "kv_layout", "dtype", "causal", "features"]
    differing = [name for name in columns if cases[name].nunique(dropna=False) > 1]
    short = {}
    for row in cases.to_dict("records"):
        extra = [_feature(name, row[name]) for name in differing if not pd.isna(row[name])]
        parts = [row["model"], row["lengths"], *extra]
        short[row["case"]] = " ".join(str(part) for part in parts if not pd.isna(part) and part)
    unique = len(set(short.values())) == len(short) and all(short.values())
    return short if unique else {case: case for case in short}


def _feature(name: str, value: object) -> str:
    if name == "causal":
        return "" if value else "full"
    return f"p{value}" if name == "page_size" else str(value)


def providers(rows: pd.DataFrame) -> list[str]:
    """Return the providers: ours, peers, ceilings, others; each by name."""
    order = {summary.OURS: 0, summary.PEER: 1, summary.CEILING: 2}
    pairs = set(zip(rows["provider"], rows["role"], strict=True))
    ranked = sorted(pairs, key=lambda pair: (order.get(pair[1], 3), pair[0]))
    return list(dict.fromkeys(name for name, _ in ranked))


def _title(provider: str, rows: pd.DataFrame) -> str:
    ceilings = rows.loc[rows["role"] == summary.CEILING, "provider"]
    return f"{provider} (ceiling)" if (ceilings == provider).any() else provider


def times(sweeps: pd.DataFrame, op: str) -> Table:
    """Return µs of each case and provider of an op, cold beside warm, and ours' ratios."""
    rows = sweeps[sweeps["op"] == op]
    mode, states = summary.headline_mode(rows), summary.l2_states(rows)
    rows = rows[rows["mode"] == mode]
    timed = summary.timed(summary.cells(rows))
    ratios = summary.ratios(summary.sweep_ratios(rows))
    ratios = ratios[ratios["against"] == summary.BEST_PEER].set_index(["case", "l2"])
    names, short = providers(timed), labels(rows)
    ms = {(row.case, row.provider, row.l2): row.ms_p50 for row in timed.itertuples()}
    best = {
        (row.case, row.best) for row in summary.best_providers(rows).itertuples()
        if row.l2 == states[0]
    }  # fmt: skip
    keys = ["ratio_best"] + [f"ratio_best_{state}" for state in states[1:]]
    columns = [Column("case", "case")]
    columns += [
        Column(key, f"ratio {s}".strip(), True) for key, s in zip(keys, states, strict=True)
    ]
    columns += [Column(name, _title(name, timed), True) for name in names]
    table = Table(f"{op}: µs per call, {mode}", columns)
    fastest = f"the fastest of ours and the peers, {states[0]}, in bold"
    table.note = f"{' / '.join(states)} L2; {fastest}. {_shared(rows)}".strip()
    for case in rows["case"].unique():
        line = [Cell(short[case])]
        line += [_ratio_cell(ratios, (case, state)) for state in states]
        for name in names:
            found = [ms.get((case, name, state), float("nan")) for state in states]
            text = " / ".join(microseconds(value) for value in found)
            shown = text if not all(pd.isna(value) for value in found) else NO_VALUE
            value = next((float(v) for v in found if not pd.isna(v)), None)
            line.append(Cell(shown, value, strong=(case, name) in best))
        table.rows.append(line)
    return table


def _ratio_cell(ratios: pd.DataFrame, key: tuple[str, str]) -> Cell:
    if key not in ratios.index:
        return Cell(NO_VALUE)
    row = ratios.loc[key]
    return Cell(interval(row["ratio"], row["low"], row["high"]), float(row["ratio"]))


def _shared(rows: pd.DataFrame) -> str:
    """Return what all cases have in common and their short names do not say."""
    facts = {
        "page_size": "page size {}",
        "kv_layout": "{}",
        "dtype": "{}",
        "head_dim": "head_dim {}",
    }
    shared = [
        text.format(rows[name].iat[0]) for name, text in facts.items()
        if rows[name].nunique(dropna=False) == 1 and not pd.isna(rows[name].iat[0])
    ]  # fmt: skip
    return f"All cases: {', '.join(shared)}." if shared else ""


def headline(sweeps: pd.DataFrame) -> Table:
    """Return ours against each other provider in the headline mode, an L2 state a column."""
    mode = summary.headline_mode(sweeps)
    means = summary.geomeans(sweeps)
    means = means[means["mode"] == mode]
    states = [state for state in summary.l2_states(sweeps) if (means["l2"] == state).any()]
    columns = [Column("against", "against")]
    for state in states:
        columns += [Column(f"geomean_{state}", f"geomean {state}", True),
                    Column(f"faster_{state}", f"faster {state}", True)]  # fmt: skip
    table = Table(f"Geomean of time ours / time of the other, {mode}", columns)
    table.note = "Below 1: ours is faster. Beside it: in how many of the compared cases it is."
    for name in _against_order(means):
        rows = means[means["against"] == name].set_index("l2")
        line = [Cell(_against_title(name, rows))]
        for state in states:
            line += _mean_cells(rows.loc[state]) if state in rows.index else [Cell(NO_VALUE)] * 2
        table.rows.append(line)
    return table


def _against_order(means: pd.DataFrame) -> list[str]:
    rank = {"best": 0, summary.PEER: 1, summary.CEILING: 2}
    pairs = set(zip(means["role"].map(rank), means["against"], strict=True))
    # "best peer" comes before "best FlashInfer".
    return list(dict.fromkeys(name for _, name in sorted(pairs, key=_backwards_if_best)))


def _backwards_if_best(pair: tuple[int, str]) -> tuple[int, bool, str]:
    return pair[0], pair[1] != summary.BEST_PEER, pair[1]


def _against_title(name: str, rows: pd.DataFrame) -> str:
    return f"{name} (ceiling)" if (rows["role"] == summary.CEILING).any() else name


def _mean_cells(row: pd.Series) -> list[Cell]:
    mean = interval(row["geomean"], row["low"], row["high"], 3)
    return [
        Cell(mean, float(row["geomean"])),
        Cell(f"{row['faster']} of {row['rows']}", float(row["faster"])),
    ]


def geomeans(sweeps: pd.DataFrame) -> Table:
    """Return the geomeans of all modes and L2 states, over all cases and per op."""
    parts = [summary.geomeans(sweeps).assign(op="all")] if sweeps["op"].nunique() > 1 else []
    parts.append(summary.geomeans(sweeps, ("op", "mode", "l2")))
    means = summary.in_reading_order(pd.concat(parts, ignore_index=True))
    names = _against_order(means)
    titles = {name: _against_title(name, means[means["against"] == name]) for name in names}
    columns = [Column("op", "op"), Column("mode", "mode"), Column("l2", "L2"),
               Column("cases", "cases", True)]  # fmt: skip
    table = Table("Geomeans", columns + [Column(n, titles[n], True) for n in names])
    table.note = (
        "Geometric mean of time ours / time of the other; in parentheses over how many cases, "
        "where it is not all of them."
    )
    for (op, mode, l2), group in means.groupby(["op", "mode", "l2"], sort=False):
        of = int(group["of"].iat[0])
        line = [Cell(op), Cell(mode), Cell(l2), Cell(str(of), of)]
        found = {row.against: row for row in group.itertuples()}
        line += [_mean_cell(found.get(name), of) for name in names]
        table.rows.append(line)
    return table


def _mean_cell(row: object, of: int) -> Cell:
    if row is None:
        return Cell(NO_VALUE)
    mean, rows = float(getattr(row, "geomean")), int(getattr(row, "rows"))  # noqa: B009
    return Cell(f"{mean:.3f}" + (f" ({rows})" if rows != of else ""), mean)


def worst(sweeps: pd.DataFrame, count: int = 10) -> Table:
    """Return the cells of the headline mode where ours is slowest against the best peer."""
    mode = summary.headline_mode(sweeps)
    ratios = summary.ratios(summary.sweep_ratios(sweeps[sweeps["mode"] == mode]))
    columns = [Column("case", "case"), Column("l2", "L2"), Column("ratio_best", "ratio", True),
               Column("ms_p50", "ours µs", True), Column("best", "best peer")]  # fmt: skip
    table = Table(f"Worst cells, {mode}", columns)
    for row in summary.worst(ratios, count=count).itertuples():
        ratio = Cell(interval(row.ratio, row.low, row.high), float(row.ratio))
        ours = Cell(microseconds(row.ms_ours), float(row.ms_ours))
        table.rows.append([Cell(row.case), Cell(row.l2), ratio, ours, Cell(row.provider)])
    return table


def best(sweeps: pd.DataFrame) -> Table:
    """Return in how many cells each provider is the fastest of ours and the peers."""
    found = summary.in_reading_order(summary.best_providers(sweeps))
    names = [name for name in providers(sweeps) if (found["best"] == name).any()]
    columns = [Column("op", "op"), Column("mode", "mode"), Column("l2", "L2")]
    table = Table("Which provider is best", columns + [Column(n, n, True) for n in names])
    table.note = "Cases in which it is the fastest of ours and the peers."
    for (op, mode, l2), group in found.groupby(["op", "mode", "l2"], sort=False):
        counts = [int((group["best"] == name).sum()) for name in names]
        line = [Cell(op), Cell(mode), Cell(l2)]
        table.rows.append(line + [Cell(str(n) if n else NO_VALUE, n) for n in counts])
    return table


def host_costs(sweeps: pd.DataFrame) -> Table:
    """Return what planning and launching cost the host."""
    columns = [Column("op", "op"), Column("provider", "provider")]
    columns += [Column("plan_us", "plan µs", True), Column("launch_us", "launch µs", True)]
    table = Table("Cost on the host", columns)
    table.note = (
        "Medians over cases: one plan until its results are on the device (once a step), and one "
        "eager call until it returns (once a layer)."
    )
    costs = summary.host_costs(sweeps)
    place = {name: number for number, name in enumerate(providers(sweeps))}
    rank = costs["op"].map({op: n * len(place) for n, op in enumerate(costs["op"].unique())})
    for row in costs.loc[(rank + costs["provider"].map(place)).sort_values().index].itertuples():
        figures = [_figure(row.plan_us), _figure(row.launch_us)]
        table.rows.append([Cell(row.op), Cell(row.provider), *figures])
    return table


def _figure(value: float) -> Cell:
    return Cell(NO_VALUE) if pd.isna(value) else Cell(number(value), float(value))


def roofs(sweeps: pd.DataFrame) -> Table:
    """Return the roofs, a sweep a row."""
    columns = [Column("sweep", "sweep"), Column("copy", "copy GB/s", True)]
    columns += [Column("read", "read GB/s", True), Column("matmul", "matmul TFLOPS", True)]
    table = Table("Roofs", columns)
    table.note = "Measured in the process of the sweep; a copy's bytes are those read and written."
    for sweep, *figures in summary.roofs(sweeps).itertuples(index=False):
        table.rows.append([Cell(sweep), *(_figure(value) for value in figures)])
    return table


def missing(sweeps: pd.DataFrame, names: int = 3) -> Table:
    """Return what has no time and why, one line a reason, the gravest first, few cases named."""
    keys = ("provider", "status", "reason", "cases", "where", "sweeps")
    table = Table("What is missing", [Column(key, key) for key in keys])
    total = sweeps["sweep"].nunique()
    found = summary.missing(sweeps)
    grave = found["status"].map({schema.UNSUPPORTED: 2, schema.NOT_RUN: 1}).fillna(0)
    for row in found.loc[grave.sort_values(kind="stable").index].itertuples():
        where = row.where or "everywhere"
        table.rows.append([
            Cell(row.provider), Cell(row.status), Cell(row.reason),
            Cell(_some(row.ops, row.cases, names)), Cell(where),
            Cell(f"{row.sweeps} of {total}"),
        ])  # fmt: skip
    return table


def _some(ops: Sequence[str], cases: Sequence[str], names: int) -> str:
    rest = len(cases) - names
    named = [*(f"all {op}" for op in ops), *cases[:names]]
    return ", ".join(named) + (f" and {rest} more" if rest > 0 else "")


def every_row(sweeps: pd.DataFrame) -> Table:
    """Return all rows of all cases, providers and modes."""
    texts = ("op", "case", "provider", "mode", "l2")
    figures = {"ratio_best": "ratio to best peer", "ratio": "ours / it", "ms_p50": "µs p50",
               "ms_p20": "µs p20", "ms_p80": "µs p80", "gbps": "GB/s", "tflops": "TFLOPS",
               "pct_roof": "% of roof", "plan_us": "plan µs", "launch_us": "launch µs"}  # fmt: skip
    columns = [Column(key, "L2" if key == "l2" else key) for key in texts]
    columns += [Column(key, title, True) for key, title in figures.items()]
    table = Table("Every row", [*columns, Column("status", "status"), Column("reason", "reason")])
    found = summary.ratios(summary.sweep_ratios(sweeps))
    keys = zip(found["case"], found["mode"], found["l2"], found["against"], strict=True)
    ratios = dict(zip(keys, found["ratio"], strict=True))
    ours = summary.our_provider(sweeps)
    for row in summary.cells(sweeps).to_dict("records"):
        at = (row["case"], row["mode"], row["l2"])
        row["ratio"] = ratios.get((*at, row["provider"]))
        row["ratio_best"] = (
            ratios.get((*at, summary.BEST_PEER)) if row["provider"] == ours else None
        )
        line = [Cell(str(row[key])) for key in texts]
        line += [_row_cell(key, row[key]) for key in figures]
        ok = row["status"] == schema.OK
        reason = "" if ok or pd.isna(row["reason"]) else row["reason"]
        table.rows.append([*line, Cell("" if pd.isna(row["status"]) else row["status"]),
                           Cell(reason)])  # fmt: skip
    return table


def _row_cell(key: str, value: float | None) -> Cell:
    if value is None or pd.isna(value):
        return Cell("")
    if key.startswith("ms_"):
        return Cell(microseconds(value), float(value))
    if key.startswith("ratio"):
        return Cell(f"{value:.3f}", float(value))
    return _figure(value)


def notes(sweeps: pd.DataFrame) -> list[str]:
    """Return what must be said before anything is read."""
    found = []
    if (sweeps["device"] == "interpreter").any():
        found.append(
            "These are times of Triton's interpreter on a CPU: they say nothing about a GPU."
        )
    mixed = {k: v for k, v in summary.environments(sweeps).items() if len(v) > 1}
    if mixed:
        facts = "; ".join(f"{name} {' and '.join(values)}" for name, values in mixed.items())
        found.append(f"The results are from different environments: {facts}.")
    if not len(summary.timed(sweeps)):
        found.append("No row has a time.")
    return found


def environment(sweeps: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the facts about the sweeps and where they ran, each once."""
    suites = ", ".join(sweeps["suite"].dropna().unique())
    stamps = sweeps["timestamp"].dropna()
    days = list(dict.fromkeys([stamps.min()[:10], stamps.max()[:10]])) if len(stamps) else []
    facts = [("suite", suites), ("sweeps", str(sweeps["sweep"].nunique())),
             ("date", " to ".join(days))]  # fmt: skip
    facts += [(k, ", ".join(v)) for k, v in summary.environments(sweeps).items() if v]
    return [(name, value) for name, value in facts if value]
