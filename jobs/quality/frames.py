"""The rows to judge, in pandas or Spark: how many each slice has, and which slices have rows that break a rule.

Spark gets its conditions as SQL text, so that an audit of small frames does not import Spark.
"""

from dataclasses import dataclass
from typing import Any, Self

import pandas as pd

from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import SPARK_NAME_FORMAT, slice_at
from jobs.quality.suite import SLICE_OF_WINDOW, Rule

# The name that is shown for rows without a slice.
NO_SLICE = "no slice"


@dataclass(frozen=True, kw_only=True)
class Broken:
    """The rows of one slice that break a rule: how many, and their lowest and highest value in the rule's column.

    ``window_slice`` is the slice where their windows begin. It differs from ``slice`` only for rows in the wrong slice.
    """

    slice: str | None
    window_slice: str | None
    failed: int
    lowest: Any
    highest: Any


@dataclass(frozen=True)
class PandasRows:
    """Rows in memory. ``frame`` is for Great Expectations; it also has the slice where each window begins."""

    frame: pd.DataFrame

    @classmethod
    def of(cls, windows: pd.DataFrame, pipeline: Pipeline) -> Self:
        """Make times comparable, number the rows anew, and add the slice where each window begins."""
        frame = windows.reset_index(drop=True).copy(deep=False)
        for column in ("window_start", "window_end"):
            frame[column] = pd.to_datetime(frame[column], utc=True)
        begins = frame["window_start"].dt.floor(f"{pipeline.slice_seconds}s")
        names = {at: slice_at(pipeline, round(at.timestamp() * 1000)).name for at in begins.dropna().unique()}
        frame[SLICE_OF_WINDOW] = begins.map(names).astype(object)
        return cls(frame)

    def counts(self) -> dict[str, int]:
        """The number of rows of each slice."""
        found = self.frame.groupby("slice", dropna=False, sort=False).size()
        return {_name(name) or NO_SLICE: int(count) for name, count in found.items()}

    def broken(self, rule: Rule) -> list[Broken]:
        """The slices with rows that break a rule; never the rows themselves."""
        rows = self.frame[rule.mask(self.frame)]
        groups = rows.groupby(["slice", SLICE_OF_WINDOW], dropna=False, sort=False)
        return [_broken(names, part, rule) for names, part in groups]

    def close(self) -> None:
        """Do nothing: Python frees the frame like any other object."""


@dataclass(frozen=True)
class SparkRows:
    """Rows of a Spark frame. They are kept in memory and on disk, since every expectation reads them."""

    frame: Any

    @classmethod
    def of(cls, windows: Any, pipeline: Pipeline) -> Self:
        """Add the slice where each window begins."""
        seconds = f"unix_seconds(window_start) - pmod(unix_seconds(window_start), {pipeline.slice_seconds})"
        name = f'date_format(timestamp_seconds({seconds}), "{SPARK_NAME_FORMAT}")'
        return cls(windows.selectExpr("*", f"{name} AS {SLICE_OF_WINDOW}").persist())

    def counts(self) -> dict[str, int]:
        """The number of rows of each slice."""
        return {row["slice"] or NO_SLICE: row["count"] for row in self.frame.groupBy("slice").count().collect()}

    def broken(self, rule: Rule) -> list[Broken]:
        """The slices with rows that break a rule."""
        value = f"`{rule.column}`" if rule.column else "NULL"
        found = self.frame.sparkSession.sql(
            f"""
            SELECT slice, {SLICE_OF_WINDOW}, count(*) AS failed, min(value) AS lowest, max(value) AS highest
            FROM (SELECT slice, {SLICE_OF_WINDOW}, {value} AS value, {rule.sql} AS broken FROM {{rows}})
            WHERE broken GROUP BY slice, {SLICE_OF_WINDOW}
            """,
            rows=self.frame,
        )
        return [
            Broken(slice=row[0], window_slice=row[1], failed=row[2], lowest=row[3], highest=row[4])
            for row in found.collect()
        ]

    def close(self) -> None:
        """Drop the rows from memory and disk."""
        self.frame.unpersist()


# The windows to judge, staged or served. Both classes have the same methods.
Rows = PandasRows | SparkRows


def rows_of(windows: Any, pipeline: Pipeline) -> Rows:
    """The rows of a frame of pandas, Arrow or Spark."""
    if isinstance(windows, pd.DataFrame):
        return PandasRows.of(windows, pipeline)
    if hasattr(windows, "selectExpr"):
        return SparkRows.of(windows, pipeline)
    # Without this option, a BIGINT column with a null would become a DOUBLE column.
    return PandasRows.of(windows.to_pandas(integer_object_nulls=True), pipeline)


def _broken(names: tuple[Any, ...], part: pd.DataFrame, rule: Rule) -> Broken:
    values = part[rule.column].dropna() if rule.column else part["slice"].iloc[:0]
    lowest, highest = (values.min(), values.max()) if len(values) else (None, None)
    return Broken(slice=_name(names[0]), window_slice=_name(names[1]), failed=len(part), lowest=lowest, highest=highest)


def _name(value: Any) -> str | None:
    return None if pd.isna(value) else str(value)
