"""Frames -> verdicts: which slices may be published, and whether the served windows are still right."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from decimal import Decimal
from typing import Any

import pandas as pd

from jobs.pipelines.pipeline import Pipeline
from jobs.quality import page, suite
from jobs.quality.frames import NO_SLICE, Broken, Rows, rows_of
from jobs.quality.suite import Rule
from jobs.quality.validation import CouldNotCheckError, Validation, validate
from jobs.quality.verdict import Failure, Verdict
from jobs.storage.folders import Folder

__all__ = ["SMALL_ROWS", "CouldNotCheckError", "Failure", "Verdict", "audit", "check_served"]

# Up to this many rows are judged in memory. That is several times faster than by Spark, and takes 1 KB per row.
SMALL_ROWS = 250_000


def audit(pipeline: Pipeline, windows: Any, slices: pd.DataFrame, *, run: str, docs: Folder) -> dict[str, Verdict]:
    """Judge the staged rows of a run, and write the page about it.

    Args:
        pipeline: its checks are applied.
        windows: the rows of all slices, a frame of pandas, Arrow or Spark: window_start, window_end, keys, measures and
            slice. Arrow stays exact where pandas turns a BIGINT with nulls into a DOUBLE.
        slices: one row for each slice, also for slices without windows: slice, rows, events, read, counted,
            window_events, inputs, expected, usual_rows. The columns after read may be null.
        run: its name, for the page.
        docs: the file of the page.

    Returns:
        The verdict of each slice, by its name.

    Raises:
        CouldNotCheckError: there is no verdict; try again.
    """
    _refuse_columns(pipeline, windows)
    names = tuple(slices["slice"])
    with closing(rows_of(windows, pipeline)) as rows:
        staged = rows.counts()
        facts = suite.facts_of_slices(slices, staged)
        of_rows = validate(rows.frame, suite.of_windows(pipeline), name=f"{pipeline.name} windows")
        of_facts = validate(facts, suite.of_slices(), name=f"{pipeline.name} slices")
        found = [*_of_facts(facts, of_facts, names), *_of_rows(rows, of_rows, names, staged)]
    failures = {name: tuple(failure for where, failure in found if where == name) for name in names}
    results = {"Slices": of_facts.result, "Windows": of_rows.result}
    page.write(docs, page.of(f"Audit of {pipeline.name}", run, failures, results))
    return {name: Verdict(failures=failures[name]) for name in names}


def check_served(
    pipeline: Pipeline,
    windows: Any,
    freshness_seconds: float | None,
    allowed_seconds: float,
    changed: Sequence[str],
    *,
    repeated: int,
    run: str,
    docs: Folder,
) -> Verdict:
    """Judge a pipeline's windows as they are served, and write the page about it.

    Args:
        pipeline: its checks are applied.
        windows: the current rows, as `audit` takes them.
        freshness_seconds: how far the newest micro-batch is behind the newest landed event; None if one is missing.
        allowed_seconds: the largest age that is allowed.
        changed: the final slices that no longer have the published checksum.
        repeated: how many windows are served more than once.
        run: its name, for the page.
        docs: the file of the page.

    Raises:
        CouldNotCheckError: there is no result; try again.
    """
    _refuse_columns(pipeline, windows)
    facts = suite.facts_of_served(freshness_seconds, changed, repeated)
    with closing(rows_of(windows, pipeline)) as rows:
        of_rows = validate(rows.frame, suite.of_windows(pipeline), name=f"{pipeline.name} windows")
        of_facts = validate(facts, suite.of_served(allowed_seconds), name=f"{pipeline.name} served")
        served = (suite.SERVED,)
        # Here all rows count for one slice, named SERVED.
        found = [*_of_facts(facts, of_facts, served), *_of_rows(rows, of_rows, served, rows.counts())]
    verdict = Verdict(failures=tuple(failure for _, failure in found))
    title = f"Check of the served rows of {pipeline.name}"
    results = {"Served": of_facts.result, "Windows": of_rows.result}
    page.write(docs, page.of(title, run, {suite.SERVED: verdict.failures}, results))
    return verdict


def _refuse_columns(pipeline: Pipeline, windows: Any) -> None:
    """Refuse a frame that lacks a column. Otherwise it would fail in many ways, and no error would name the reason."""
    there = set(getattr(windows, "column_names", None) or windows.columns)
    missing = [name for name in ("window_start", "window_end", *pipeline.value_columns, "slice") if name not in there]
    if missing:
        raise CouldNotCheckError(f"{pipeline.name} windows: there are no columns {missing}, only {sorted(there)}")


def _of_rows(
    rows: Rows, validation: Validation, names: Sequence[str], staged: Mapping[str, int]
) -> Iterator[tuple[str, Failure]]:
    for rule, failed in validation.broken:
        found = rows.broken(rule)
        _agree(rule, failed, sum(part.failed for part in found))
        for name, parts in _by_slice(found, names).items():
            yield name, _failure(rule, rule.observed.format(**_observed(parts, staged)))


def _of_facts(facts: pd.DataFrame, validation: Validation, names: Sequence[str]) -> Iterator[tuple[str, Failure]]:
    for rule, failed in validation.broken:
        broken = facts[rule.mask(facts)].to_dict("records")
        _agree(rule, failed, len(broken))
        for fact in broken:
            observed = rule.observed.format(**fact)
            if fact["slice"] in names:
                yield fact["slice"], _failure(rule, observed)
                continue
            # The run has not planned this slice, so its rows are missing in a slice of the run. It is unknown in which
            # one, so all fail.
            yield from ((name, _failure(rule, f"{fact['slice']}: {observed}")) for name in names)


def _agree(rule: Rule, failed: int, found: int) -> None:
    if failed != found:
        raise CouldNotCheckError(
            f"{rule.sentence!r}: Great Expectations counts {failed} failing rows, but a search finds {found}"
        )


def _by_slice(found: Iterable[Broken], names: Sequence[str]) -> dict[str, list[Broken]]:
    """A row in the wrong slice counts against both slices. A row of a slice outside the run counts against all."""
    by_slice: dict[str, list[Broken]] = {}
    for part in found:
        meant = [name for name in names if name in (part.slice, part.window_slice)]
        for name in meant or names:
            by_slice.setdefault(name, []).append(part)
    return by_slice


def _observed(parts: Sequence[Broken], staged: Mapping[str, int]) -> dict[str, Any]:
    lowest = [part.lowest for part in parts if part.lowest is not None]
    highest = [part.highest for part in parts if part.highest is not None]
    return {
        "failed": sum(part.failed for part in parts),
        "rows": sum(staged[name] for name in {part.slice or NO_SLICE for part in parts}),
        "lowest": _plain(min(lowest, default=None)),
        "highest": _plain(max(highest, default=None)),
    }


def _plain(value: Any) -> str:
    """A value as text. A DECIMAL is written without an exponent."""
    return format(value, "f") if isinstance(value, Decimal) else str(value)


def _failure(rule: Rule, observed: str) -> Failure:
    return Failure(
        expectation=rule.sentence, type=rule.type, column=rule.column, severity=rule.severity, observed=observed
    )
