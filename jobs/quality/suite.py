"""The rules for windows, for the numbers of a slice, and for served windows. Great Expectations judges them.

A rule is written three times: as an expectation, as a condition for pandas, and as a condition for Spark. The
expectation gives the verdict; the conditions only find the broken rows. `audit` fails if they count different numbers.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pandas as pd

from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.window import Severity

# The name of a column that is added to the rows. No column of a pipeline begins with an underscore.
SLICE_OF_WINDOW = "_slice_of_window"
# A slice with this many times fewer or more rows than usual gets a warning.
USUAL_FACTOR = 10
# Served windows are judged as a whole, under this name.
SERVED = "served"
_NAMES_SHOWN = 5

_Checked = TypeVar("_Checked")
_NUMBERS = ("rows", "events", "read", "counted", "window_events", "inputs", "expected")
Mask = Callable[[pd.DataFrame], "pd.Series[bool]"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One expectation: its sentence, its type in Great Expectations, and which rows break it.

    ``observed`` is a template for the text of a failure. In a rule for windows it may use `{failed}`, `{rows}`,
    `{lowest}` and `{highest}`. In any other rule it may use the columns of the facts, such as `{staged}`.
    """

    sentence: str
    type: str
    arguments: Mapping[str, Any]
    column: str | None
    severity: Severity
    observed: str
    mask: Mask
    sql: str


def of_windows(pipeline: Pipeline) -> tuple[Rule, ...]:
    """The rules for every row of windows, staged or served."""
    identity = ("window_start", "window_end", *pipeline.keys)
    present = _hardest((check.column, check.severity) for check in pipeline.checks)
    bounds = _hardest(((check.column, check.minimum, check.maximum), check.severity) for check in pipeline.checks)
    critical = dict.fromkeys((*identity, "slice"), Severity.CRITICAL)
    return (
        *(_never_null(column, severity) for column, severity in {**present, **critical}.items()),
        *(_within(*bound, severity) for bound, severity in bounds.items() if bound[1:] != (None, None)),
        _unique(identity),
        _before("window_start", "window_end"),
        _equal(
            "slice",
            SLICE_OF_WINDOW,
            "slice is the one in which the window begins",
            "{failed} of {rows} rows",
            ignore="either_value_is_missing",
        ),
    )


def of_slices() -> tuple[Rule, ...]:
    """The rules for the numbers of a slice; each slice is one row.

    The table in the docstring of `jobs.finality.auditing._facts` explains each number.
    """
    return (
        _equal(
            "staged",
            "rows",
            "each row belongs to a slice of the run",
            "staged rows={staged}, rows of the slice={rows}",
        ),
        _equal("read", "events", "each accepted event was read", "events read={read}, accepted={events}"),
        _equal(
            "counted",
            "window_events",
            "each event is counted in each of its windows",
            "events counted in windows={counted}, expected={window_events}",
            ignore="either_value_is_missing",
        ),
        _equal(
            "inputs",
            "expected",
            "each row of the transform is in each of its windows",
            "rows in windows={inputs}, expected={expected}",
            ignore="either_value_is_missing",
        ),
        _usual("rows", "fewest", f"rows are at least 1/{USUAL_FACTOR} of the usual number"),
        _usual("most", "rows", f"rows are at most {USUAL_FACTOR} times the usual number"),
    )


def of_served(allowed_seconds: float) -> tuple[Rule, ...]:
    """The rules for a pipeline's windows as they are served."""
    return (
        _at_most(
            "freshness_seconds",
            allowed_seconds,
            sentence=f"windows are at most {allowed_seconds:.12g} s old",
            observed="{freshness_seconds:.12g} s",
        ),
        _at_most(
            "changed_slices",
            0,
            sentence="final slices are as they were published",
            observed="{changed_slices} changed: {names}",
        ),
        _at_most(
            "repeated_windows",
            0,
            sentence="a window and key is served once, live or final",
            observed="{repeated_windows} are served more than once",
        ),
    )


def facts_of_slices(slices: pd.DataFrame, staged: Mapping[str, int]) -> pd.DataFrame:
    """The numbers of each slice beside the number of rows that were staged for it.

    Rows may be staged for a slice that the run has not planned. Such a slice gets a line with ``rows`` = 0, so the rule
    about staged rows fails. If a slice has no rows, its sum of counted events may be null, which means 0.
    """
    facts = [_facts(row, staged.get(row["slice"], 0)) for row in slices.to_dict("records")]
    # Sorted, because Spark finds them in any order.
    strange = sorted(staged.keys() - set(slices["slice"]))
    nothing = {"rows": 0, "events": 0, "read": 0, **dict.fromkeys((*_NUMBERS[3:], "usual_rows"))}
    facts += [_facts({"slice": name, **nothing}, staged[name]) for name in strange]
    return pd.DataFrame(facts, columns=["slice", "staged", *nothing, "fewest", "most"], dtype=object)


def facts_of_served(freshness_seconds: float | None, changed: Sequence[str], repeated: int) -> pd.DataFrame:
    """The numbers of the served windows, as one row."""
    named = sorted(changed)
    more = f" and {len(named) - _NAMES_SHOWN} more" if len(named) > _NAMES_SHOWN else ""
    fact = {
        "slice": SERVED,
        "freshness_seconds": freshness_seconds,
        "changed_slices": len(named),
        "repeated_windows": repeated,
        "names": ", ".join(named[:_NAMES_SHOWN]) + more,
    }
    return pd.DataFrame([fact], dtype=object)


def _facts(row: Mapping[Any, Any], staged: int) -> dict[str, Any]:
    numbers = {name: None if pd.isna(row[name]) else int(row[name]) for name in _NUMBERS}
    usual = None if pd.isna(row["usual_rows"]) else row["usual_rows"]
    if numbers["counted"] is None and numbers["window_events"] is not None:
        numbers["counted"] = 0
    return {
        **numbers,
        "slice": row["slice"],
        "staged": staged,
        "usual_rows": usual,
        "fewest": None if usual is None else math.ceil(usual / USUAL_FACTOR),
        "most": None if usual is None else math.floor(usual * USUAL_FACTOR),
    }


def _hardest(checks: Iterable[tuple[_Checked, Severity]]) -> dict[_Checked, Severity]:
    """Each check once. If it is given twice, the harder severity counts."""
    hardest: dict[_Checked, Severity] = {}
    for checked, severity in checks:
        if hardest.get(checked) is not Severity.CRITICAL:
            hardest[checked] = severity
    return hardest


def _never_null(column: str, severity: Severity) -> Rule:
    return Rule(
        sentence=f"{column} is never null",
        type="expect_column_values_to_not_be_null",
        arguments={"column": column},
        column=column,
        severity=severity,
        observed="{failed} of {rows} values are null",
        mask=lambda rows: rows[column].isna(),
        sql=f"`{column}` IS NULL",
    )


def _at_most(column: str, maximum: float, *, sentence: str, observed: str) -> Rule:
    """A rule about a number of the served windows, with a sentence of its own."""
    return replace(_within(column, None, maximum, Severity.CRITICAL), sentence=sentence, observed=observed)


def _within(column: str, minimum: int | None, maximum: float | None, severity: Severity) -> Rule:
    def outside(value: Any) -> bool:
        return (minimum is not None and value < minimum) or (maximum is not None and value > maximum)

    bounds = {"<": minimum, ">": maximum}
    return Rule(
        sentence=f"{column} is {_range(minimum, maximum)}",
        type="expect_column_values_to_be_between",
        arguments={"column": column, "min_value": minimum, "max_value": maximum},
        column=column,
        severity=severity,
        observed="{failed} of {rows} values, from {lowest} to {highest}",
        mask=lambda rows: rows[column].map(lambda value: not pd.isna(value) and outside(value)).astype(bool),
        sql=" OR ".join(f"`{column}` {sign} {bound}" for sign, bound in bounds.items() if bound is not None),
    )


def _range(minimum: int | None, maximum: float | None) -> str:
    if minimum is None:
        return f"at most {maximum}"
    return f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"


def _unique(columns: tuple[str, ...]) -> Rule:
    names = ", ".join(f"`{column}`" for column in columns)
    return Rule(
        sentence=f"{', '.join(columns)} are unique together",
        type="expect_compound_columns_to_be_unique",
        # Two nulls are equal, here and in the conditions.
        arguments={"column_list": list(columns), "ignore_row_if": "never"},
        column=None,
        severity=Severity.CRITICAL,
        observed="{failed} of {rows} rows are repeated",
        mask=lambda rows: rows.duplicated(list(columns), keep=False),
        sql=f"count(*) OVER (PARTITION BY {names}) > 1",
    )


def _before(start: str, end: str) -> Rule:
    return Rule(
        sentence=f"{start} is before {end}",
        type="expect_column_pair_values_a_to_be_greater_than_b",
        arguments={"column_A": end, "column_B": start, "ignore_row_if": "either_value_is_missing"},
        column=end,
        severity=Severity.CRITICAL,
        observed="{failed} of {rows} rows",
        mask=lambda rows: rows[start] >= rows[end],
        sql=f"`{start}` >= `{end}`",
    )


def _equal(one: str, other: str, sentence: str, observed: str, *, ignore: str = "neither") -> Rule:
    def differ(rows: pd.DataFrame) -> "pd.Series[bool]":
        known = rows[one].notna() & rows[other].notna()
        return (rows[one] != rows[other]) & (known if ignore != "neither" else True)

    return Rule(
        sentence=sentence,
        type="expect_column_pair_values_to_be_equal",
        arguments={"column_A": one, "column_B": other, "ignore_row_if": ignore},
        column=one,
        severity=Severity.CRITICAL,
        observed=observed,
        mask=differ,
        # Of these rules Spark evaluates only the one for windows, about `slice`. It ignores rows with a null, as `<>`
        # does. The numbers of slices are always in pandas.
        sql=f"`{one}` <> `{other}`",
    )


def _usual(more: str, fewer: str, sentence: str) -> Rule:
    def beyond(rows: pd.DataFrame) -> "pd.Series[bool]":
        known = rows[more].notna() & rows[fewer].notna()
        return (rows[more][known] < rows[fewer][known]).reindex(rows.index, fill_value=False).astype(bool)

    return Rule(
        sentence=sentence,
        type="expect_column_pair_values_a_to_be_greater_than_b",
        arguments={
            "column_A": more,
            "column_B": fewer,
            "or_equal": True,
            "ignore_row_if": "either_value_is_missing",
        },
        column="rows",
        severity=Severity.WARNING,
        observed="rows={rows}, usual number={usual_rows:.12g}",
        mask=beyond,
        sql="",
    )
