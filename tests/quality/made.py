"""Rows of windows and numbers of slices as a good run would stage them. Each test breaks one part of them."""

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pandas as pd
from hypothesis import strategies as st

from jobs.pipelines import PIPELINES
from jobs.pipelines.window import Check, Severity

FIRST = datetime(2026, 1, 31, 12, tzinfo=UTC)
SLICES = ("20260131T120000Z", "20260131T120100Z", "20260131T120200Z")
BILLION = 1_000_000_000
PIPELINE = replace(
    PIPELINES["rolling_sum"],
    checks=(
        Check(column="total"),
        Check(column="mean", minimum=-BILLION, maximum=BILLION),
        Check(column="events", minimum=1),
        Check(column="events", maximum=100, severity=Severity.WARNING),
    ),
)
COLUMNS = ("window_start", "window_end", "key", "total", "mean", "events", "slice")
SPARK_TYPES = (
    "window_start timestamp, window_end timestamp, key string, total decimal(28,6), mean decimal(28,10), "
    "events bigint, slice string"
)


def row(slice_: int = 0, second: int = 0, **changes: Any) -> dict[str, Any]:
    """The row of a series' window that begins ``second`` seconds after the begin of a slice."""
    start = FIRST + timedelta(minutes=slice_, seconds=second)
    made = {
        "window_start": start,
        "window_end": start + timedelta(seconds=1),
        "key": "a",
        "total": Decimal("3.500000"),
        "mean": Decimal("1.7500000000"),
        "events": 2,
        "slice": SLICES[slice_],
    }
    return made | changes


def rows() -> list[dict[str, Any]]:
    """Three slices of four rows."""
    return [row(slice_, second) for slice_ in range(3) for second in range(4)]


def frame(of: list[dict[str, Any]]) -> pd.DataFrame:
    """The rows as they come from Arrow: a DECIMAL is an object, and so is a BIGINT in a column with nulls."""
    made = pd.DataFrame(of, columns=list(COLUMNS), dtype=object)
    for column in ("window_start", "window_end"):
        made[column] = pd.to_datetime(made[column], utc=True)
    return made


def slices(of: list[dict[str, Any]], **changes: list[Any]) -> pd.DataFrame:
    """The numbers of the three slices that fit these rows."""
    staged = Counter(one["slice"] for one in of)
    counts = [staged[name] for name in SLICES]
    events = [2 * count for count in counts]
    made = {"slice": list(SLICES), "rows": counts, "events": events, "read": events, "counted": events}
    made |= {"window_events": events, "inputs": events, "expected": events, "usual_rows": [None] * 3}
    return pd.DataFrame(made | changes)


_LAST_DIGIT = Decimal("0.0000000001")
_NEAR_THE_BOUNDS = [sign * (BILLION + step * _LAST_DIGIT) for sign in (1, -1) for step in (-1, 0, 1)]
_CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "slice": st.sampled_from([*SLICES, "20260131T130000Z", None]),
        "window_start": st.none(),
        "window_end": st.sampled_from([None, FIRST, FIRST + timedelta(seconds=90)]),
        "key": st.sampled_from(["b", "", "A", None]),
        "total": st.none() | st.decimals(min_value=-2, max_value=2, places=6),
        "mean": st.sampled_from([None, *_NEAR_THE_BOUNDS]),
        "events": st.none() | st.integers(-2, 2) | st.sampled_from([2**63 - 1, -(2**63)]),
    },
)
ANY_ROW = st.builds(
    lambda at, second, changes: row(at, second, **changes), st.integers(0, 2), st.integers(0, 2), _CHANGES
)
_BOUNDS = {"total": (-1, 0, 1), "mean": (-BILLION, BILLION), "events": (0, 1, 2**53, 2**63 - 1, -(2**63))}


def _check(column: str, bounds: tuple[int | None, int | None], severity: Severity) -> Check:
    low, high = bounds if None in bounds else sorted(bound for bound in bounds if bound is not None)
    return Check(column=column, minimum=low, maximum=high, severity=severity)


ANY_CHECK = st.sampled_from(sorted(_BOUNDS)).flatmap(
    lambda column: st.builds(
        _check,
        st.just(column),
        st.tuples(*[st.none() | st.sampled_from(_BOUNDS[column])] * 2),
        st.sampled_from(list(Severity)),
    )
) | st.builds(lambda severity: Check(column="key", severity=severity), st.sampled_from(list(Severity)))
