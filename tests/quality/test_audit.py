"""Verdicts of an audit in memory: each rule holds and breaks, each slice is judged for itself."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.pipelines.window import Check, Severity
from jobs.quality.audit import CouldNotCheckError, Failure, audit, check_served
from tests.quality import made, naive
from tests.quality.made import BILLION, PIPELINE, SLICES, row

FIRST, SECOND, THIRD = SLICES
Rows = list[dict[str, Any]]
Judge = Callable[..., dict[str, tuple[Failure, ...]]]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    def failures(rows: Rows, /, **changes: list[Any]) -> dict[str, tuple[Failure, ...]]:
        docs = tmp_path / "run.html"
        verdicts = audit(PIPELINE, made.frame(rows), made.slices(rows, **changes), run="run", docs=docs)
        assert list(verdicts) == list(SLICES)
        return {name: verdict.failures for name, verdict in verdicts.items() if verdict.failures}

    return failures


def said(failures: tuple[Failure, ...]) -> list[tuple[str, str]]:
    return [(failure.expectation, failure.observed) for failure in failures]


def test_good_rows_pass(judge: Judge) -> None:
    assert judge(made.rows()) == {}


def test_slices_without_rows_pass(judge: Judge) -> None:
    assert judge([row(1)]) == {}
    assert judge([]) == {}


BROKEN: dict[str, tuple[Rows, str, str]] = {
    "null measure": ([row(1, 9, total=None)], "total is never null", "1 of 5 values are null"),
    "null in a column with bounds": ([row(1, 9, events=None)], "events is never null", "1 of 5 values are null"),
    "null key": ([row(1, 9, key=None)], "key is never null", "1 of 5 values are null"),
    "below": (
        [row(1, 9, events=0), row(1, 10, events=-5)],
        "events is at least 1",
        "2 of 6 values, from -5 to 0",
    ),
    "above": (
        [row(1, 9, mean=Decimal("1000000000.0000000001"))],
        f"mean is between -{BILLION} and {BILLION}",
        "1 of 5 values, from 1000000000.0000000001 to 1000000000.0000000001",
    ),
    "twice": ([row(1, 0)], "window_start, window_end, key are unique together", "2 of 5 rows are repeated"),
    "no length": (
        [row(1, 9, window_end=row(1, 9)["window_start"])],
        "window_start is before window_end",
        "1 of 5 rows",
    ),
    "ends before it begins": (
        [row(1, 9, window_end=row(1, 9)["window_start"] - timedelta(seconds=1))],
        "window_start is before window_end",
        "1 of 5 rows",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_rows_block_their_slice_alone(judge: Judge, name: str) -> None:
    bad, sentence, observed = BROKEN[name]
    failures = judge([*made.rows(), *bad])
    assert list(failures) == [SECOND]
    assert said(failures[SECOND]) == [(sentence, observed)]
    assert failures[SECOND][0].severity is Severity.CRITICAL


def test_values_at_the_bounds_pass(judge: Judge) -> None:
    bounds = [row(0, 9, mean=Decimal(BILLION), events=1), row(0, 10, mean=Decimal(-BILLION), events=100)]
    assert judge([*made.rows(), *bounds]) == {}


def test_the_same_window_of_another_key_is_another_row(judge: Judge) -> None:
    assert judge([*made.rows(), row(1, 0, key="b")]) == {}


def test_a_failure_names_its_expectation(judge: Judge) -> None:
    assert judge([row(0, total=None)])[FIRST] == (
        Failure(
            expectation="total is never null",
            type="expect_column_values_to_not_be_null",
            column="total",
            severity=Severity.CRITICAL,
            observed="1 of 1 values are null",
        ),
    )


def test_a_warning_reports_and_lets_pass(tmp_path: Path) -> None:
    rows = [*made.rows(), row(2, 9, events=101)]
    verdicts = audit(PIPELINE, made.frame(rows), made.slices(rows), run="run", docs=tmp_path / "run.html")
    assert [verdict.passed for verdict in verdicts.values()] == [True, True, True]
    assert [failure.severity for failure in verdicts[THIRD].failures] == [Severity.WARNING]
    rows.append(row(2, 10, events=0))
    verdicts = audit(PIPELINE, made.frame(rows), made.slices(rows), run="run", docs=tmp_path / "run.html")
    assert [verdict.passed for verdict in verdicts.values()] == [True, True, False]


@pytest.mark.parametrize(
    ("severities", "found"),
    [("cw", Severity.CRITICAL), ("wc", Severity.CRITICAL), ("ww", Severity.WARNING)],
)
def test_a_column_checked_twice_is_as_hard_as_one_of_the_two(tmp_path: Path, severities: str, found: Severity) -> None:
    checks = [
        Check(column="total", maximum=0, severity=Severity("critical" if s == "c" else "warning")) for s in severities
    ]
    rows = [row(0), row(0, 1, total=None)]
    pipeline = replace(PIPELINE, checks=tuple(checks))
    verdict = audit(pipeline, made.frame(rows), made.slices(rows), run="run", docs=tmp_path / "run.html")[FIRST]
    assert [failure.severity for failure in verdict.failures] == [found, found]


def test_a_row_in_the_wrong_slice_blocks_both(judge: Judge) -> None:
    failures = judge([*made.rows(), row(1, 9, slice=FIRST)])
    assert list(failures) == [FIRST, SECOND]
    for found in failures.values():
        assert said(found) == [("slice is the one in which the window begins", "1 of 5 rows")]


@pytest.mark.parametrize("stray", ["20260131T130000Z", None])
def test_rows_of_no_slice_of_the_run_block_all(judge: Judge, stray: str | None) -> None:
    failures = judge([*made.rows(), row(1, 9, slice=stray)])
    assert list(failures) == list(SLICES)
    for found in failures.values():
        name = stray or "no slice"
        assert ("each row belongs to a slice of the run", f"{name}: staged rows=1, rows of the slice=0") in said(found)


NUMBERS: dict[str, tuple[dict[str, list[Any]], str, str, Severity]] = {
    "fewer read": ({"read": [8, 7, 8]}, "each accepted event was read", "events read=7, accepted=8", Severity.CRITICAL),
    "more read": ({"read": [8, 9, 8]}, "each accepted event was read", "events read=9, accepted=8", Severity.CRITICAL),
    "fewer counted": (
        {"counted": [8, 7, 8]},
        "each event is counted in each of its windows",
        "events counted in windows=7, expected=8",
        Severity.CRITICAL,
    ),
    "nothing counted": (
        {"counted": [8, None, 8]},
        "each event is counted in each of its windows",
        "events counted in windows=0, expected=8",
        Severity.CRITICAL,
    ),
    "rows lost": (
        {"rows": [4, 5, 4]},
        "each row belongs to a slice of the run",
        "staged rows=4, rows of the slice=5",
        Severity.CRITICAL,
    ),
    "few rows": (
        {"usual_rows": [None, 41, 40]},
        "rows are at least 1/10 of the usual number",
        "rows=4, usual number=41",
        Severity.WARNING,
    ),
    "many rows": (
        {"usual_rows": [None, 0.3, 0.4]},
        "rows are at most 10 times the usual number",
        "rows=4, usual number=0.3",
        Severity.WARNING,
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_a_slice_that_do_not_fit(judge: Judge, name: str) -> None:
    changes, sentence, observed, severity = NUMBERS[name]
    failures = judge(made.rows(), **changes)
    assert list(failures) == [SECOND]
    assert said(failures[SECOND]) == [(sentence, observed)]
    assert failures[SECOND][0].severity is severity


def test_numbers_that_nobody_knows_are_not_compared(judge: Judge) -> None:
    unknown = [None] * 3
    assert judge(made.rows(), window_events=unknown, counted=unknown) == {}
    assert judge(made.rows(), window_events=unknown) == {}
    # A sum over no rows is null, which is right if the slice has no events to count.
    assert judge([row(1)], counted=[None, 2, None], window_events=[0, 2, 0]) == {}


def test_a_slice_that_lost_all_its_rows_is_blocked(judge: Judge) -> None:
    failures = judge([row(1)], counted=[None, 2, None], window_events=[5, 2, 0])
    assert list(failures) == [FIRST]


def test_a_bound_and_a_value_beyond_a_double_are_compared_exactly(tmp_path: Path) -> None:
    large = 2**53 + 1
    pipeline = replace(PIPELINE, checks=(Check(column="events", maximum=large), Check(column="total", minimum=-large)))
    rows = [
        row(0, 0, events=large, total=Decimal(-large)),
        row(1, 1, events=large + 1),
        row(2, 2, total=Decimal(-large) - Decimal("0.000001")),
        row(2, 3, events=None),
    ]
    # A BIGINT with a null is a DOUBLE in pandas: Arrow keeps it.
    types = [
        *((name, pa.timestamp("us", "UTC")) for name in ("window_start", "window_end")),
        *(("key", pa.string()), ("total", pa.decimal128(28, 6)), ("mean", pa.decimal128(28, 10))),
        *(("events", pa.int64()), ("slice", pa.string())),
    ]
    table = pa.Table.from_pylist(rows, pa.schema(types))
    verdicts = audit(pipeline, table, made.slices(rows), run="run", docs=tmp_path / "run.html")
    assert {name: [f.expectation for f in verdict.failures] for name, verdict in verdicts.items()} == {
        FIRST: [],
        SECOND: [f"events is at most {large}"],
        THIRD: ["events is never null", f"total is at least {-large}"],
    }


def test_a_missing_column_is_no_verdict(tmp_path: Path) -> None:
    rows, docs = made.rows(), tmp_path / "run.html"
    with pytest.raises(CouldNotCheckError, match=r"no columns \['total'\]"):
        audit(PIPELINE, made.frame(rows).drop(columns="total"), made.slices(rows), run="run", docs=docs)
    assert not docs.exists()


def test_what_great_expectations_cannot_evaluate_is_no_verdict(tmp_path: Path) -> None:
    rows, docs = [*made.rows(), row(1, 9, mean="much")], tmp_path / "run.html"
    with pytest.raises(CouldNotCheckError, match=r"'mean is between .*' could not be checked: "):
        audit(PIPELINE, made.frame(rows), made.slices(rows), run="run", docs=docs)
    assert not docs.exists()
    # The next audit in the same process does not disturb it.
    assert audit(PIPELINE, made.frame(made.rows()), made.slices(made.rows()), run="run", docs=docs)[FIRST].passed


def test_judging_changes_nothing(tmp_path: Path) -> None:
    rows = [*made.rows(), row(0, 0)]
    windows, slices = made.frame(rows), made.slices(rows)
    windows.index = pd.Index([7] * len(rows))
    before = windows.copy(), slices.copy()
    verdicts = audit(PIPELINE, windows, slices, run="run", docs=tmp_path / "run.html")
    assert not verdicts[FIRST].passed
    pd.testing.assert_frame_equal(windows, before[0])
    pd.testing.assert_frame_equal(slices, before[1])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(made.ANY_ROW, max_size=8), st.lists(made.ANY_CHECK, max_size=4))
def test_equals_a_plain_search(tmp_path: Path, rows: Rows, checks: list[Check]) -> None:
    pipeline = replace(PIPELINE, checks=tuple(checks))
    verdicts = audit(pipeline, made.frame(rows), made.slices(rows), run="run", docs=tmp_path / "run.html")
    found = {name: {f.expectation: f for f in verdict.failures} for name, verdict in verdicts.items()}
    expected = naive.broken(rows, checks)
    assert {name: set(failures) for name, failures in found.items()} == {n: set(b) for n, b in expected.items()}
    for name, failures in found.items():
        for sentence, failure in failures.items():
            if sentence != naive.STRAY:
                assert failure.observed.startswith(f"{expected[name][sentence]} of "), failure
            assert failure.severity is naive.severity(sentence, checks)


def served(
    tmp_path: Path, rows: Rows, freshness: float | None = 1.5, changed: list[str] | None = None, repeated: int = 0
) -> Any:
    docs = tmp_path / "check.html"
    verdict = check_served(
        PIPELINE, made.frame(rows), freshness, 90, changed or [], repeated=repeated, run="check", docs=docs
    )
    assert docs.exists()
    return said(verdict.failures)


@pytest.mark.parametrize("freshness", [None, 0.0, 90.0])
def test_what_is_served_passes(tmp_path: Path, freshness: float | None) -> None:
    assert served(tmp_path, made.rows(), freshness) == []
    assert served(tmp_path, [], freshness) == []


def test_what_is_served_may_be_old_or_changed_or_bad(tmp_path: Path) -> None:
    assert served(tmp_path, made.rows(), 90.5) == [("windows are at most 90 s old", "90.5 s")]
    assert served(tmp_path, made.rows(), changed=[SECOND, FIRST]) == [
        ("final slices are as they were published", f"2 changed: {FIRST}, {SECOND}")
    ]
    assert served(tmp_path, made.rows(), changed=[f"s{number}" for number in range(9)]) == [
        ("final slices are as they were published", "9 changed: s0, s1, s2, s3, s4 and 4 more")
    ]
    assert served(tmp_path, made.rows(), repeated=2) == [
        ("a window and key is served once, live or final", "2 are served more than once")
    ]
    assert served(tmp_path, [*made.rows(), row(0, 9, events=-1), row(2, 9, events=-7)]) == [
        ("events is at least 1", "2 of 10 values, from -7 to -1")
    ]
