"""Events -> windows: the one plan that the streaming job and the batch recompute share."""

from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, FloatType

from jobs.pipelines.spec import Pipeline, RefusedDefinitionError, Window, WindowKind

SLICE_FORMAT = "yyyyMMdd'T'HHmmss'Z'"


def aggregate(events: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Apply the transform and the measures to accepted events.

    Returns:
        window_start, window_end, the pipeline's keys, its measures and the slice of each window.
    """
    sources: dict[str, Any] = {pipeline.source.name: events}
    transformed = events.sparkSession.sql(pipeline.transform, args=None, **sources)
    keys = [F.col(f"`{key}`") for key in pipeline.keys]
    windows = transformed.groupBy(_window(pipeline.window).alias("window"), *keys).agg(
        *(F.expr(measure.sql).alias(measure.name) for measure in pipeline.measures)
    )
    for frame, made in ((transformed, "transform"), (windows, "measures")):
        _refuse_inexact(frame, made, pipeline)
    return windows.select(
        F.col("window.start").alias("window_start"),
        F.col("window.end").alias("window_end"),
        *keys,
        *(F.col(measure.name).cast(measure.type).alias(measure.name) for measure in pipeline.measures),
        slice_of(F.col("window.start"), pipeline.slice_seconds).alias("slice"),
    )


def slice_of(window_start: Column, slice_seconds: int) -> Column:
    """The name of the slice a window belongs to: the start of the slice, sortable and safe in a path."""
    seconds = F.unix_seconds(window_start)
    return F.date_format(F.timestamp_seconds(seconds - F.pmod(seconds, F.lit(slice_seconds))), SLICE_FORMAT)


def _window(window: Window) -> Column:
    if window.kind is WindowKind.SESSION:
        return F.session_window("event_time", f"{window.slide_ms} milliseconds")
    return F.window("event_time", f"{window.size_ms} milliseconds", f"{window.slide_ms} milliseconds")


def _refuse_inexact(frame: DataFrame, made: str, pipeline: Pipeline) -> None:
    """What the text of a definition cannot show: a DOUBLE that comes out of it."""
    inexact = [f.name for f in frame.schema.fields if isinstance(f.dataType, DoubleType | FloatType)]
    if inexact:
        raise RefusedDefinitionError(
            f"pipeline {pipeline.name!r}: {made} make {inexact} a DOUBLE, whose last digit depends on the order of "
            "the records: cast to DECIMAL, divide a sum by a count instead of avg"
        )
