"""What changed between two sets of sweeps, and whether it is more than noise."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from tritonattn.perf import schema, summary

FLOOR = 0.02  # a smaller change is never flagged
# With fewer runs than this on a side the noise between runs was not seen, and what it may be is
# assumed: by mode, from runs of one commit on one GPU. Eager times hold the host's as well.
ENOUGH_RUNS = 3
UNSEEN = {"graph": 0.15, "eager": 0.5}

SLOWER, FASTER, SAME = "slower", "faster", "same"
STOPPED, BEGAN = "stopped being ok", "began to be ok"
ONLY_BASE, ONLY_NEW, NEITHER = "only in base", "only in new", "ok in neither"
REGRESSIONS = (SLOWER, STOPPED)
VERDICTS = (SLOWER, STOPPED, FASTER, BEGAN, ONLY_BASE, ONLY_NEW, NEITHER, SAME)

COLUMNS = (
    *schema.KEY, "role", "verdict", "ratio", "noise", "ms_base", "ms_new", "status_base",
    "status_new", "reason_base", "reason_new", "runs_base", "runs_new",
)  # fmt: skip

_KEY = list(schema.KEY)


def compare(base: Sequence[pd.DataFrame], new: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Compare two sets of sweeps row by row.

    Parameters
    ----------
    base, new : sequence of DataFrame
        Tables of sweeps; several of a side are runs of the same thing.

    Returns
    -------
    DataFrame
        One row for each case, provider, mode and L2 state of either side. `ratio` is the median of
        `ms_p50` of new over that of base, below 1 where new is faster. `noise` is the largest of
        the widths from p20 to p80 within runs, of the ranges of medians between runs, and of
        `FLOOR`, relative to the median; of `UNSEEN` instead if a side has few runs. A row is slower
        above `1 + noise` and faster below `1 / (1 + noise)`. A row that is not ok in one run of a
        side is not ok there; one that was not run, for want of time, is as if it were not there.
    """
    sides = [_side(summary.combine(frames)) for frames in (base, new)]
    table = sides[0].merge(sides[1], on=_KEY, how="outer", suffixes=("_base", "_new"), sort=False)
    table["role"] = table["role_new"].fillna(table["role_base"])
    table["ratio"] = table["ms_new"] / table["ms_base"]
    few = table[["runs_base", "runs_new"]].min(axis=1) < ENOUGH_RUNS
    least = table["mode"].map(UNSEEN).fillna(max(UNSEEN.values())).where(few, FLOOR)
    noise = table[["noise_base", "noise_new"]].astype(float).max(axis=1).clip(lower=least)
    table["noise"] = noise.where(table["ratio"].notna())
    table["verdict"] = [_verdict(row) for row in table.to_dict("records")]
    rank = {verdict: place for place, verdict in enumerate(VERDICTS)}
    table = table.assign(rank=table["verdict"].map(rank), size=-(table["ratio"] - 1).abs())
    return table.sort_values(["rank", "size"], kind="stable", ignore_index=True)[list(COLUMNS)]


def _side(sweeps: pd.DataFrame) -> pd.DataFrame:
    rows = sweeps[sweeps["status"] != schema.NOT_RUN]
    # A run in which the row is not ok speaks for its side.
    bad = rows[rows["status"] != schema.OK].drop_duplicates(_KEY)
    first = pd.concat([bad, rows[rows["status"] == schema.OK]]).drop_duplicates(_KEY)
    good = rows[rows["status"] == schema.OK]
    good = good.assign(spread=(good["ms_p80"] - good["ms_p20"]) / good["ms_p50"])
    groups = good.groupby(_KEY, sort=False)
    times = groups["ms_p50"].agg(["median", "min", "max", "size"])
    between = (times["max"] - times["min"]) / times["median"]
    inside = groups["spread"].median().fillna(0.0)
    found = pd.DataFrame({
        "ms": times["median"], "runs": times["size"],
        "noise": pd.concat([inside, between], axis=1).max(axis=1),
    })  # fmt: skip
    side = first[[*_KEY, "role", "status", "reason"]].merge(
        found.reset_index(), on=_KEY, how="left"
    )
    side["runs"] = side["runs"].astype("Int64")
    # A time beside a failure is no time to compare.
    side.loc[side["status"] != schema.OK, ["ms", "noise"]] = pd.NA
    return side


def _verdict(row: dict[str, object]) -> str:
    base, new = row["status_base"], row["status_new"]
    if pd.isna(base) or pd.isna(new):
        return ONLY_NEW if pd.isna(base) else ONLY_BASE
    if base != schema.OK or new != schema.OK:
        return STOPPED if base == schema.OK else BEGAN if new == schema.OK else NEITHER
    ratio, noise = row["ratio"], row["noise"]
    if pd.isna(ratio):
        return SAME
    assert isinstance(ratio, float)
    assert isinstance(noise, float)
    return SLOWER if ratio > 1 + noise else FASTER if ratio < 1 / (1 + noise) else SAME


def environments(base: Sequence[pd.DataFrame], new: Sequence[pd.DataFrame]) -> list[str]:
    """Return a line for each fact about the environment that the two sides do not share."""
    facts = [summary.environments(summary.combine(frames)) for frames in (base, new)]
    return [
        f"{name}: {', '.join(facts[0][name]) or 'unknown'} against "
        f"{', '.join(facts[1][name]) or 'unknown'}"
        for name in facts[0]
        if set(facts[0][name]) != set(facts[1][name])
    ]


def machine(base: Sequence[pd.DataFrame], new: Sequence[pd.DataFrame]) -> dict[str, float]:
    """Return new / base of each roof that both sides measured: the machine's own difference."""
    sides = [summary.roofs(summary.combine(frames)) for frames in (base, new)]
    medians = [side.drop(columns="sweep").astype(float).median() for side in sides]
    return {str(name): float(value) for name, value in (medians[1] / medians[0]).dropna().items()}
