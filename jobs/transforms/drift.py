"""Events, live rows and final rows -> the drift balance: why live and final differ, and which part is unexplained.

The stream counts an event in a window if two things are true. The event is not too far ahead of its arrival. And the
window ends after the watermark by which the event's micro-batch drops late events. The live table has the offsets and
this watermark of each micro-batch. So the events that live has counted are known without a look at its numbers. Two
equations must hold for each window and key:

    live  = the measures over the events that live has counted
    final = the measures over these events, minus the events that only live may have (duplicate, after_final),
            plus the events that only final may have (before_checkpoint, not_reached, ahead, late)

A number that breaks its equation is unexplained. docs/drift.md describes the causes and the tables.
"""

from enum import StrEnum
from functools import reduce
from operator import or_

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.window import Measure
from jobs.transforms.aggregate import is_ahead, measure, slice_of, transform, window_of

# How long after a window's end its live value is compared with the final one.
AGES_MS = (1_000, 5_000, 15_000, 60_000, 300_000)
# The type of sums over measures, whatever their scale.
TOTAL = "DECIMAL(38,10)"
_NO_NUMBERS = ("STRING", "TIMESTAMP")
_NO_CAUSES = "CAST(map() AS MAP<STRING, BIGINT>)"


class Cause(StrEnum):
    """Why an event counts on one side only. Live misses events of the first four causes, final those of the others."""

    BEFORE_CHECKPOINT = "before_checkpoint"
    NOT_REACHED = "not_reached"
    AHEAD = "ahead"
    LATE = "late"
    DUPLICATE = "duplicate"
    AFTER_FINAL = "after_final"


_IN_LIVE_ONLY = (Cause.DUPLICATE.value, Cause.AFTER_FINAL.value)


def tagged(events: DataFrame, pipeline: Pipeline, batches: DataFrame, width: int, finals: DataFrame) -> DataFrame:
    """Transform the events. Find for each event and window of a final slice whether live has counted it, and the cause.

    An event is left out if live has not counted it and it has no cause. Example: final ignores the second copy of an
    event, and live has ignored this copy because it was late. If final has counted an event that is left out here, the
    difference is unexplained.

    Args:
        events: accepted events that can fall into windows of the slices. None that the stream
            has read may be missing.
        pipeline: the pipeline of the events.
        batches: partition, start, end (exclusive) and watermark of each range of offsets that the stream took.
        width: the ranges of ``batches`` are cut at multiples of this number of offsets, as `_with_batch` shows.
        finals: slice, version, offsets (of its header), begins and reached (from where to where the stream has read).
            The last three are maps from partition to offset.

    Returns:
        The transform's columns, _window, _partition, _offset, _counted (whether live has the event) and _cause (null if
        both sides have it).
    """
    placed = _with_batch(events, batches, width).withColumn("_window", window_of(pipeline.window))
    in_slice = slice_of(F.col("_window.start"), pipeline.slice_seconds)
    known = finals.select(*(F.col(name).alias(f"_{name}") for name in ("slice", "offsets", "begins", "reached")))
    due = placed.withColumn("_slice", in_slice).join(F.broadcast(known), "_slice")
    flagged = _with_sides(due, pipeline).withColumns({"_partition": F.col("partition"), "_offset": F.col("offset")})
    separated = flagged.withColumn("_cause", _cause(pipeline)).where("_counted OR _cause IS NOT NULL")
    return transform(separated, pipeline, carry=("_window", "_partition", "_offset", "_counted", "_cause"))


def _with_batch(events: DataFrame, batches: DataFrame, width: int) -> DataFrame:
    """Each event with the watermark of the batch that took it, or null if no batch took it.

    Ranges are cut at multiples of the width. So Spark joins by hash, and does not compare each event with each batch.
    Example: with a width of 100, the range [250, 420) becomes the steps 2, 3 and 4. The event at offset 310 is compared
    only with the ranges that have step 3.
    """
    cut = batches.where("end > start").select(
        F.col("partition").alias("_of"),
        F.col("start").alias("_from"),
        F.col("end").alias("_to"),
        F.col("watermark").alias("_watermark"),
    )
    cut = cut.withColumn("_step", F.expr(f"explode(sequence(_from div {width}, (_to - 1) div {width}))"))
    on = (
        (F.col("partition") == F.col("_of"))
        & (F.expr(f"offset div {width}") == F.col("_step"))
        & (F.col("offset") >= F.col("_from"))
        & (F.col("offset") < F.col("_to"))
    )
    return events.join(F.broadcast(cut), on, "left").drop("_of", "_from", "_to", "_step")


def _with_sides(events: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Add whether live has counted an event in a window, and whether final has."""
    before_offsets = F.col("offset") < _of_partition("_offsets")
    counted = F.col("_watermark").isNotNull() & ~is_ahead(pipeline) & (F.col("_window.end") > F.col("_watermark"))
    sides = events.withColumns({"_before_offsets": before_offsets, "_counted": counted})
    return sides.withColumn("_final", F.col("_before_offsets") & _is_first(pipeline))


def _is_first(pipeline: Pipeline) -> Column:
    """Whether this is the first copy of its event, by the rule of `first_arrivals`.

    Copies before the header's offsets, and copies after them, are judged apart.
    """
    if not pipeline.source.identity:
        return F.lit(True)
    same = ("_window", "_before_offsets", "event_time", *(f"`{name}`" for name in pipeline.source.identity))
    return F.row_number().over(Window.partitionBy(*same).orderBy("arrival_time", "partition", "offset")) == 1


def _cause(pipeline: Pipeline) -> Column:
    """The cause why only one side has an event; null if both have it, or neither.

    Null, too, if the stream has read past the event's offset, but no batch has this offset. That is an error of the
    stream, and no cause explains it.
    """
    offset, taken = F.col("offset"), F.col("_watermark").isNotNull()
    missing = (
        F.when(~taken & (offset < _of_partition("_begins")), Cause.BEFORE_CHECKPOINT.value)
        .when(~taken & (offset >= _of_partition("_reached")), Cause.NOT_REACHED.value)
        .when(taken & is_ahead(pipeline), Cause.AHEAD.value)
        .when(taken, Cause.LATE.value)
    )
    added = F.when(F.col("_before_offsets"), Cause.DUPLICATE.value).otherwise(Cause.AFTER_FINAL.value)
    return F.when(F.col("_final") & ~F.col("_counted"), missing).when(F.col("_counted") & ~F.col("_final"), added)


def _of_partition(offsets: str) -> Column:
    return F.coalesce(F.try_element_at(offsets, F.col("partition")), F.lit(0))


def balance(transformed: DataFrame, live: DataFrame, final: DataFrame, pipeline: Pipeline) -> DataFrame:
    """All windows of the slices side by side.

    Args:
        transformed: as `tagged` returns it.
        live: all live rows of the slices, with epoch, batch and as_of.
        final: the final rows of the slices.
        pipeline: the pipeline of the rows.

    Returns:
        window_start, window_end, keys, slice, unexplained, causes, differs, is_unexplained; and structs of measures,
        null where there is no row: live and final as they are stored, counted (what live must be), complete (what final
        must be), and what live was at each age.
    """
    in_final = F.col("_cause").isNull() | ~F.col("_cause").isin(*_IN_LIVE_ONLY)
    sides = [
        _made_of(transformed.where("_counted"), pipeline, "counted"),
        _made_of(transformed.where(in_final), pipeline, "complete"),
        _newest(live, pipeline),
        final.select(*_at(pipeline), _values(pipeline).alias("final")),
        _causes(transformed, pipeline),
    ]
    rows = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), sides)
    names = [name for name in rows.columns if name not in ("window_start", "window_end", *pipeline.keys)]
    whole = rows.groupBy(*_at(pipeline)).agg(*(F.any_value(name, ignoreNulls=True).alias(name) for name in names))
    return _judged(whole, pipeline)


def _made_of(transformed: DataFrame, pipeline: Pipeline, side: str) -> DataFrame:
    """The values that a side must have: the measures over exactly its events."""
    windows = measure(transformed, pipeline, F.col("_window"))
    return windows.select(*_at(pipeline), _values(pipeline).alias(side))


def _newest(live: DataFrame, pipeline: Pipeline) -> DataFrame:
    """The newest live row of each window and key, and the row that was the newest at each age."""
    order = F.struct("epoch", "batch")
    ages = [
        F.max_by(_values(pipeline), F.when(F.col("as_of") <= F.col("window_end") + _interval(age), order)).alias(
            _at_age(age)
        )
        for age in AGES_MS
    ]
    return live.groupBy(*_at(pipeline)).agg(F.max_by(_values(pipeline), order).alias("live"), *ages)


def _causes(transformed: DataFrame, pipeline: Pipeline) -> DataFrame:
    """How many events separate live and final in each window and key, by cause."""
    keys = zip(pipeline.keys, pipeline.value_types, strict=False)
    at = [F.col("_window.start").alias("window_start"), F.col("_window.end").alias("window_end")]
    at += [F.col(f"`{name}`").cast(type_).alias(name) for name, type_ in keys]
    separating = transformed.where("_cause IS NOT NULL").groupBy(*at, "_cause")
    counts = separating.agg(F.count_distinct("_partition", "_offset").alias("_events"))
    entries = F.map_from_entries(F.collect_list(F.struct("_cause", "_events")))
    return counts.groupBy(*_at(pipeline)).agg(entries.alias("causes"))


def _judged(whole: DataFrame, pipeline: Pipeline) -> DataFrame:
    unexplained = F.struct(*(_unexplained(each).alias(each.name) for each in pipeline.measures))
    judged = whole.withColumns(
        {
            "slice": slice_of(F.col("window_start"), pipeline.slice_seconds),
            "unexplained": unexplained,
            "causes": F.coalesce("causes", F.expr(_NO_CAUSES)),
            "differs": ~F.col("live").eqNullSafe(F.col("final")),
        }
    )
    wrong = [_field("unexplained", each).isNull() | (_field("unexplained", each) != 0) for each in pipeline.measures]
    return judged.withColumn("is_unexplained", reduce(or_, wrong))


def _unexplained(each: Measure) -> Column:
    """Live minus counted (what live must be); if that is 0, final minus complete (what final must be)."""
    in_live, in_final = _difference("live", "counted", each), _difference("final", "complete", each)
    return F.when(in_live == 0, in_final).otherwise(in_live)


def _difference(side: str, right: str, each: Measure) -> Column:
    """A side minus the value that it must have: 0 if both agree, null if they differ and cannot be subtracted."""
    found, wanted = _field(side, each), _field(right, each)
    both = F.col(side).isNull() == F.col(right).isNull()
    kind = unexplained_type(each)
    difference = F.lit(None).cast(kind) if each.type in _NO_NUMBERS else F.try_subtract(found, wanted).try_cast(kind)
    return F.when(both & found.eqNullSafe(wanted), F.lit(0).cast(kind)).otherwise(difference)


def unexplained_type(each: Measure) -> str:
    """The SQL type of this measure's unexplained difference."""
    return "BIGINT" if each.type in _NO_NUMBERS else each.type


def drift_rows(balance: DataFrame, finals: DataFrame, pipeline: Pipeline, run: str) -> DataFrame:
    """The rows of the drift table: windows that differ, that have a cause, or that are unexplained."""
    shown = balance.where(F.col("differs") | F.col("is_unexplained") | (F.size("causes") > 0))
    return shown.join(F.broadcast(finals.select("slice", "version")), "slice").select(
        *_at(pipeline),
        "slice",
        "version",
        F.lit(run).alias("run"),
        "live",
        "final",
        "unexplained",
        "causes",
        F.substring("slice", 1, 8).alias("day"),
    )


def totals(balance: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Count windows per slice, and measure how far live was from final, for each measure and age.

    Returns:
        slice, windows, differing, unexplained and ages: an array of measure, age_ms, exact, error and magnitude.
    """
    ages = [_age(each, age_ms) for each in pipeline.measures for age_ms in AGES_MS]
    return balance.groupBy("slice").agg(
        F.count("*").alias("windows"),
        F.count_if("differs").alias("differing"),
        F.count_if("is_unexplained").alias("unexplained"),
        F.array(*ages).alias("ages"),
    )


def _age(each: Measure, age_ms: int) -> Column:
    """How far live was from final at an age.

    In the error, a missing row counts as zero. A window that lacks the row of one side is not exact.
    """
    live, final = _field(_at_age(age_ms), each), _field("final", each)
    same = F.col(_at_age(age_ms)).isNull() == F.col("final").isNull()
    return F.struct(
        F.lit(each.name).alias("measure"),
        F.lit(age_ms).cast("bigint").alias("age_ms"),
        F.count_if(same & live.eqNullSafe(final)).alias("exact"),
        _sum_of(each, F.try_subtract(_or_zero(live), _or_zero(final))).alias("error"),
        _sum_of(each, _or_zero(final)).alias("magnitude"),
    )


def _sum_of(each: Measure, value: Column) -> Column:
    nothing = F.lit(None).cast(TOTAL)
    return nothing if each.type in _NO_NUMBERS else F.try_sum(F.abs(value.try_cast(TOTAL))).try_cast(TOTAL)


def causes_by_slice(transformed: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Per slice and cause: how many events separate live and final, and how many pairs of an event and a window."""
    in_slice = slice_of(F.col("_window.start"), pipeline.slice_seconds).alias("slice")
    return (
        transformed.where("_cause IS NOT NULL")
        .groupBy(in_slice, F.col("_cause").alias("cause"))
        .agg(
            F.count_distinct("_partition", "_offset").alias("events"),
            F.count_distinct("_partition", "_offset", "_window").alias("window_events"),
        )
    )


def _at(pipeline: Pipeline) -> list[Column]:
    return [F.col("window_start"), F.col("window_end"), *(F.col(f"`{key}`") for key in pipeline.keys)]


def _values(pipeline: Pipeline) -> Column:
    return F.struct(*(F.col(f"`{each.name}`") for each in pipeline.measures))


def _field(side: str, each: Measure) -> Column:
    return F.col(f"{side}.{each.name}")


def _or_zero(value: Column) -> Column:
    return F.coalesce(value, F.lit(0))


def _at_age(age_ms: int) -> str:
    return f"_after_{age_ms}"


def _interval(age_ms: int) -> Column:
    return F.expr(f"INTERVAL {age_ms} milliseconds")
