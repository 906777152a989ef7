"""A table of text with the values behind it, and how figures are rounded for reading.

Times are rounded here and nowhere before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd

NO_VALUE = "–"  # noqa: RUF001 (a dash in a table)


@dataclass(slots=True, frozen=True)
class Column:
    """A column; tables are sorted by `key`."""

    key: str
    title: str
    numeric: bool = False


@dataclass(slots=True, frozen=True)
class Cell:
    """What is shown, and what is sorted by: the value if there is one, else the text."""

    text: str
    value: float | None = None
    strong: bool = False


@dataclass(slots=True)
class Table:
    """Columns and rows of as many cells, under a title and a line of explanation."""

    title: str
    columns: list[Column]
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""


def microseconds(ms: float) -> str:
    """Return a time in µs with three digits or more."""
    if pd.isna(ms):
        return NO_VALUE
    us = ms * 1e3
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def number(value: float, digits: int = 3) -> str:
    """Return a figure with so many significant digits, never in exponents."""
    if pd.isna(value):
        return NO_VALUE
    decimals = digits - len(str(int(abs(value)))) if abs(value) >= 1 else digits
    return f"{value:.{max(0, decimals)}f}"


def interval(value: float, low: float, high: float, digits: int = 2) -> str:
    """Return a ratio, and its lowest and highest where there were several."""
    if pd.isna(value):
        return NO_VALUE
    text = f"{value:.{digits}f}"
    if pd.isna(low) or low == high:
        return text
    return f"{text} [{low:.{digits}f}, {high:.{digits}f}]"
