"""The expected findings of an audit in rows of windows, in plain Python and row by row."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from jobs.pipelines.window import Check, Severity
from tests.quality.made import FIRST, SLICES

Row = dict[str, Any]
STRAY = "each row belongs to a slice of the run"
_SOFT = re.compile(r"(total|mean|events) is .*")


def broken(rows: list[Row], checks: Iterable[Check]) -> dict[str, dict[str, int]]:
    """For each slice the broken rules as sentences, and the number of rows that break each."""
    identities = Counter(_identity(row) for row in rows)
    found: dict[str, Counter[str]] = {name: Counter() for name in SLICES}
    for row in rows:
        sentences = set(_sentences(row, checks, identities[_identity(row)]))
        own = [name for name in SLICES if name in (row["slice"], _begins_in(row))]
        for name in own or SLICES:
            found[name].update(sentences)
        if row["slice"] not in SLICES:
            for name in SLICES:
                found[name][STRAY] += 1
    return {name: dict(sentences) for name, sentences in found.items()}


def severity(sentence: str, checks: Iterable[Check]) -> Severity:
    """Critical, unless all checks with this rule only warn."""
    asked = [check.severity for check in checks if sentence in _asked(check)]
    return Severity.WARNING if _SOFT.fullmatch(sentence) and Severity.CRITICAL not in asked else Severity.CRITICAL


def _asked(check: Check) -> tuple[str, str]:
    return f"{check.column} is never null", f"{check.column} is {_range(check.minimum, check.maximum)}"


def _identity(row: Row) -> tuple[Any, ...]:
    return row["window_start"], row["window_end"], row["key"]


def _begins_in(row: Row) -> str | None:
    if row["window_start"] is None:
        return None
    return SLICES[int((row["window_start"] - FIRST).total_seconds() // 60)]


def _sentences(row: Row, checks: Iterable[Check], alike: int) -> Iterable[str]:
    checked = {check.column for check in checks}
    for column in {"window_start", "window_end", "key", "slice", *checked}:
        if row[column] is None:
            yield f"{column} is never null"
    for check in checks:
        value, low, high = row[check.column], check.minimum, check.maximum
        if value is not None and ((low is not None and value < low) or (high is not None and value > high)):
            yield f"{check.column} is {_range(low, high)}"
    if alike > 1:
        yield "window_start, window_end, key are unique together"
    if None not in (row["window_start"], row["window_end"]) and row["window_start"] >= row["window_end"]:
        yield "window_start is before window_end"
    if None not in (row["slice"], _begins_in(row)) and row["slice"] != _begins_in(row):
        yield "slice is the one in which the window begins"


def _range(low: int | None, high: int | None) -> str:
    if low is None:
        return f"at most {high}"
    return f"at least {low}" if high is None else f"between {low} and {high}"
