"""What the tables of one or several sweeps say: ratios, geomeans, worst cells, what is missing.

Every function maps tables to a table or a value. A ratio is time ours / time of the other, below 1
where ours is faster, and is taken within one sweep; over several sweeps its median counts, with the
lowest and the highest beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from tritonattn.perf import schema

OURS, PEER, CEILING = "ours", "peer", "ceiling"  # roles
BEST_PEER = "best peer"
BEST_FLASHINFER = "best FlashInfer"

_KEY = list(schema.KEY)
_CELL = ["op", "case", "mode", "l2"]
_MEASURED = ["ms_p20", "ms_p50", "ms_p80", "plan_us", "launch_us", "gbps", "tflops", "pct_roof"]
_ROOFS = ["roof_copy_gbps", "roof_read_gbps", "roof_matmul_tflops"]
_RATIO = [*_CELL, "against", "role", "provider", "sweep", "ms_ours", "ms", "ratio"]


def combine(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Stack results; the column `sweep` tells one run from another.

    A row that was measured twice in one sweep counts once, as it was measured last: so does a
    result that is given twice.
    """
    parts = [
        frame.assign(sweep=frame["run_id"].fillna(f"result {number}"))
        for number, frame in enumerate(frames, 1)
        if len(frame)
    ]
    if not parts:
        return schema.empty_frame().assign(sweep=pd.Series(dtype="string"))
    stacked = pd.concat(parts, ignore_index=True)
    # A key without a value would fall out of every groupby.
    keys = [*_KEY, "op", "role"]
    stacked[keys] = stacked[keys].fillna("")
    return stacked.drop_duplicates(["sweep", *_KEY], keep="last").reset_index(drop=True)


def timed(sweeps: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that have a time to count."""
    return sweeps[(sweeps["status"] == schema.OK) & (sweeps["ms_p50"] > 0)]


def cells(sweeps: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each case, provider, mode and L2 state, in the order of the sweeps.

    Measured columns are medians over the sweeps in which the row is ok, whose number is `sweeps`;
    the status is ok if there is one.
    """
    keys = sweeps.drop_duplicates(_KEY)[_KEY]
    if not len(sweeps):
        return sweeps.assign(sweeps=pd.Series(dtype="int64"))
    good = sweeps["status"] == schema.OK
    first = pd.concat([sweeps[good], sweeps[~good]]).drop_duplicates(_KEY)
    medians = sweeps[good].groupby(_KEY, sort=False)[_MEASURED].median()
    medians["sweeps"] = sweeps[good].groupby(_KEY, sort=False).size()
    table = keys.merge(first.drop(columns=_MEASURED), on=_KEY)
    table = table.merge(medians.reset_index(), on=_KEY, how="left")
    return table.assign(sweeps=table["sweeps"].fillna(0).astype(int))


def our_provider(sweeps: pd.DataFrame) -> str | None:
    """Return the provider that ratios are about: `triton`, or else the first of role "ours"."""
    names = list(sweeps.loc[sweeps["role"] == OURS, "provider"].unique())
    return "triton" if "triton" in names else names[0] if names else None


def headline_mode(sweeps: pd.DataFrame) -> str:
    """Return the mode to show first: graph replays, where anything was timed in them."""
    modes = list(timed(sweeps)["mode"].unique()) or list(sweeps["mode"].unique())
    return next((mode for mode in ("graph", "eager") if mode in modes), modes[0] if modes else "")


def in_reading_order(table: pd.DataFrame) -> pd.DataFrame:
    """Return rows with `op`, `mode` and `l2` by op as it comes, graph before eager, cold first."""
    ops = {op: place for place, op in enumerate(table["op"].unique())}
    ranks = table.assign(
        op=table["op"].map(ops), mode=table["mode"] != "graph", l2=table["l2"] != "cold"
    )
    return table.loc[ranks.sort_values(["op", "mode", "l2"], kind="stable").index]


def l2_states(sweeps: pd.DataFrame) -> list[str]:
    """Return the L2 states there are, cold first: it is what a layer inside a model sees."""
    return sorted(sweeps["l2"].unique(), key=lambda state: (state != "cold", state))


def sweep_ratios(sweeps: pd.DataFrame) -> pd.DataFrame:
    """Return the ratios within each sweep.

    Ours stands against each peer, each ceiling, the best peer of the cell, and the best of
    FlashInfer's paths, as the column `against` says; `provider` names which one that was.
    """
    rows = timed(sweeps)
    cell = ["sweep", *_CELL]
    ours = rows.loc[rows["provider"] == our_provider(sweeps), [*cell, "ms_p50"]]
    others = rows.loc[rows["role"].isin([PEER, CEILING]), [*cell, "provider", "role", "ms_p50"]]
    peers = others[others["role"] == PEER]
    flashinfer = peers[peers["provider"].str.startswith("flashinfer")]
    table = pd.concat(
        [
            _fastest(peers, cell).assign(against=BEST_PEER, role="best"),
            _fastest(flashinfer, cell).assign(against=BEST_FLASHINFER, role="best"),
            others.assign(against=others["provider"]),
        ],
        ignore_index=True,
    )
    table = ours.rename(columns={"ms_p50": "ms_ours"}).merge(table, on=cell)
    table = table.rename(columns={"ms_p50": "ms"})
    return table.assign(ratio=table["ms_ours"] / table["ms"])[_RATIO]


def _fastest(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    return rows.sort_values("ms_p50", kind="stable").drop_duplicates(by).sort_index()


def ratios(per_sweep: pd.DataFrame) -> pd.DataFrame:
    """Return each ratio's median over the sweeps, with its lowest and highest, from `sweep_ratios`.

    `provider` is the one that was compared with most often.
    """
    by = [*_CELL, "against", "role"]
    groups = per_sweep.groupby(by, sort=False)
    table = groups["ratio"].agg(["median", "min", "max", "size"])
    table.columns = ["ratio", "low", "high", "sweeps"]
    table["ms_ours"] = groups["ms_ours"].median()
    counts = per_sweep.groupby([*by, "provider"], sort=False).size().rename("times").reset_index()
    most = counts.sort_values("times", ascending=False, kind="stable").drop_duplicates(by)
    return table.reset_index().merge(most[[*by, "provider"]], on=by)


def geomeans(sweeps: pd.DataFrame, by: Sequence[str] = ("mode", "l2")) -> pd.DataFrame:
    """Return geometric means of the median ratios over the cases of each group.

    `low` and `high` are the range of this mean and those of the single sweeps, missing unless each
    sweep has every ratio; `rows` counts the ratios, `of` the cells of the group whether or not
    ours and the other were timed there, and `faster` the ratios below 1.
    """
    by = list(by)
    group = [*by, "role", "against"]
    per_sweep = sweep_ratios(sweeps)
    medians = ratios(per_sweep)
    medians = medians.assign(log=_log(medians["ratio"]), faster=medians["ratio"] < 1)
    table = medians.groupby(group, sort=False).agg(
        mean=("log", "mean"), rows=("log", "size"), faster=("faster", "sum")
    )
    singles = per_sweep.assign(log=_log(per_sweep["ratio"])).groupby([*group, "sweep"])["log"]
    ends = singles.agg(["mean", "size"]).groupby(group).agg(
        low=("mean", "min"), high=("mean", "max"), fewest=("size", "min")
    )  # fmt: skip
    table = table.join(ends)
    whole = table["fewest"] == table["rows"]
    for name, end in (("low", np.minimum), ("high", np.maximum)):
        table[name] = np.exp(end(table[name], table["mean"])).where(whole)
    table["geomean"] = np.exp(table["mean"])
    of = sweeps.drop_duplicates(_CELL).groupby(by, sort=False).size().rename("of")
    table = table.reset_index().merge(of.reset_index(), on=by, how="left")
    return table[[*group, "geomean", "low", "high", "rows", "faster", "of"]]


def _log(values: pd.Series) -> pd.Series:
    return np.log(values.astype(float))


def worst(table: pd.DataFrame, against: str = BEST_PEER, count: int = 10) -> pd.DataFrame:
    """Return the cells of `ratios` where ours is slowest against another, the slowest first."""
    rows = table[table["against"] == against]
    return rows.sort_values("ratio", ascending=False, kind="stable").head(count)


def best_providers(sweeps: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest of ours and the peers in each cell, and how much slower the next one is.

    Within a sweep times are taken relative to the fastest; the median over sweeps decides.
    """
    rows = timed(sweeps)
    rows = rows[rows["role"].isin([OURS, PEER])]
    fastest = rows.groupby(["sweep", *_CELL])["ms_p50"].transform("min")
    rows = rows.assign(relative=rows["ms_p50"] / fastest)
    names = [*_CELL, "provider"]
    table = rows.groupby(names, sort=False)[["relative", "ms_p50"]].median().reset_index()
    table = table.sort_values("relative", kind="stable")
    place = table.groupby(_CELL, sort=False).cumcount()
    second = table[place == 1].rename(columns={"provider": "second", "relative": "second_relative"})
    best = table[place == 0].sort_index().rename(columns={"provider": "best"})
    best = best.merge(second[[*_CELL, "second", "second_relative"]], on=_CELL, how="left")
    margin = best["second_relative"] / best["relative"]
    return best.assign(margin=margin)[[*_CELL, "best", "ms_p50", "second", "margin"]]


def missing(sweeps: pd.DataFrame) -> pd.DataFrame:
    """Return what has no time, one line for each provider, status and reason.

    `ops` names the ops of which it is every case that the provider has, `cases` the other cases;
    `where` names the modes and L2 states unless it is all of them, and `sweeps` counts the sweeps.
    """
    rows = sweeps[sweeps["status"] != schema.OK].fillna({"status": "", "reason": ""})
    of = sweeps.groupby(["provider", "op"])["case"].nunique()
    everywhere = {name: _places(group) for name, group in sweeps.groupby("provider")}
    found = []
    for (provider, status, reason), group in rows.groupby(
        ["provider", "status", "reason"], sort=False
    ):
        places = _places(group)
        counts = group.groupby("op", sort=False)["case"].nunique()
        ops = [op for op, count in counts.items() if count == of[provider, op]]
        found.append({
            "provider": provider,
            "status": status,
            "reason": reason,
            "ops": tuple(ops),
            "cases": tuple(group.loc[~group["op"].isin(ops), "case"].unique()),
            "where": "" if places == everywhere[provider] else ", ".join(places),
            "sweeps": int(group["sweep"].nunique()),
            "rows": len(group),
        })  # fmt: skip
    columns = ["provider", "status", "reason", "ops", "cases", "where", "sweeps", "rows"]
    return pd.DataFrame(found, columns=columns)


def _places(rows: pd.DataFrame) -> list[str]:
    return sorted(
        {f"{mode} {l2}".strip() for mode, l2 in zip(rows["mode"], rows["l2"], strict=True)}
    )


def host_costs(sweeps: pd.DataFrame) -> pd.DataFrame:
    """Return the median plan and launch time of each provider, per op."""
    rows = cells(sweeps)
    rows = rows[rows["plan_us"].notna() | rows["launch_us"].notna()]
    columns = ["op", "provider"]
    return rows.groupby(columns, sort=False)[["plan_us", "launch_us"]].median().reset_index()


def roofs(sweeps: pd.DataFrame) -> pd.DataFrame:
    """Return the roofs that each sweep measured, one row a sweep."""
    table = sweeps.groupby("sweep", sort=False)[_ROOFS].median()
    return table.dropna(how="all").reset_index()


def environments(sweeps: pd.DataFrame) -> dict[str, list[str]]:
    """Return the values that each environment column has, in the order of the schema."""
    return {
        name: [str(value) for value in sweeps[name].dropna().unique()]
        for name in schema.ENVIRONMENT
    }
