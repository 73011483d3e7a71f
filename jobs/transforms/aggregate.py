"""Events -> windows: the one plan that the streaming job and the batch recompute share."""

import re
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, FloatType

from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.rules import RefusedDefinitionError
from jobs.pipelines.slices import SPARK_NAME_FORMAT
from jobs.pipelines.window import Window, WindowKind


def aggregate(events: DataFrame, pipeline: Pipeline, *more: Column) -> DataFrame:
    """Apply the transform and the measures to accepted events.

    Returns:
        window_start, window_end, the pipeline's keys, its measures, the slice of each window, and the aggregates in
        ``more``.
    """
    return measure(transform(events, pipeline), pipeline, window_of(pipeline.window), *more)


def inputs_of_windows(events: DataFrame, pipeline: Pipeline) -> DataFrame:
    """One row for each pair of a row of the transform and one of its windows: window_start and slice.

    Unlike `aggregate` it groups nothing. So the number of these rows shows whether `aggregate` has lost a row.
    """
    windows = transform(events, pipeline).select(window_of(pipeline.window).alias("window"))
    start = F.col("window.start")
    return windows.select(start.alias("window_start"), slice_of(start, pipeline.slice_seconds).alias("slice"))


def transform(events: DataFrame, pipeline: Pipeline, carry: tuple[str, ...] = ()) -> DataFrame:
    """The rows that the pipeline's transform makes of events; ``carry`` names columns of the events to keep."""
    sources: dict[str, Any] = {pipeline.source.name: events}
    select = re.sub(r"^\s*SELECT\s", f"SELECT {''.join(f'{name}, ' for name in carry)}", pipeline.transform, flags=re.I)
    transformed = events.sparkSession.sql(select, args=None, **sources)
    _refuse_inexact(transformed, "transform", pipeline)
    return transformed


def measure(transformed: DataFrame, pipeline: Pipeline, window: Column, *more: Column) -> DataFrame:
    """The measures per window and key, and the aggregates in ``more``."""
    keys = [F.col(f"`{key}`") for key in pipeline.keys]
    windows = transformed.groupBy(window.alias("window"), *keys).agg(
        *(F.expr(measure.sql).alias(measure.name) for measure in pipeline.measures), *more
    )
    _refuse_inexact(windows, "measures", pipeline)
    added = windows.columns[1 + len(pipeline.value_columns) :]
    return windows.select(
        F.col("window.start").alias("window_start"),
        F.col("window.end").alias("window_end"),
        *(
            F.col(f"`{name}`").cast(type_).alias(name)
            for name, type_ in zip(pipeline.value_columns, pipeline.value_types, strict=True)
        ),
        slice_of(F.col("window.start"), pipeline.slice_seconds).alias("slice"),
        *added,
    )


def is_ahead(pipeline: Pipeline) -> Column:
    """Whether an event's time is later than its arrival by more than the watermark's delay. Live leaves it out.

    Otherwise one producer with a fast clock would move the watermark, and all other events would be late.
    """
    delay = F.expr(f"INTERVAL {pipeline.watermark_delay_seconds} seconds")
    return F.col("event_time") > F.col("arrival_time") + delay


def slice_of(window_start: Column, slice_seconds: int) -> Column:
    """The name of a window's slice: the start of the slice, which sorts by time and is safe in a path."""
    seconds = F.unix_seconds(window_start)
    return F.date_format(F.timestamp_seconds(seconds - F.pmod(seconds, F.lit(slice_seconds))), SPARK_NAME_FORMAT)


def window_of(window: Window) -> Column:
    """The windows of an event."""
    if window.kind is WindowKind.SESSION:
        return F.session_window("event_time", f"{window.slide_ms} milliseconds")
    return F.window("event_time", f"{window.size_ms} milliseconds", f"{window.slide_ms} milliseconds")


def _refuse_inexact(frame: DataFrame, made: str, pipeline: Pipeline) -> None:
    """Refuse a DOUBLE in the result. A definition's text does not always show it: `avg(x)` of a BIGINT is a DOUBLE."""
    inexact = [f.name for f in frame.schema.fields if isinstance(f.dataType, DoubleType | FloatType)]
    if inexact:
        raise RefusedDefinitionError(
            f"pipeline {pipeline.name!r}: {inexact} of {made} is a DOUBLE, whose last digit depends on the order of "
            "the records: cast it to DECIMAL, and write sum(x) / count(*) instead of avg(x)"
        )
