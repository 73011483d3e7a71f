"""The recompute job: computes the windows of a plan's slices as the live job would, and stages them as files."""

import logging
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from jobs import session
from jobs.failpoints import FailPoint, may_fail_at
from jobs.finality.run.folder import Plan, RunFolder
from jobs.finality.run.tries import StagedSlice, Try, stop_when_task_ends
from jobs.lake.final import INPUTS
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import Slice, adjacent_groups, event_ranges
from jobs.pipelines.source import Source
from jobs.refusal import Refusal
from jobs.settings import Settings
from jobs.storage.folders import Folder
from jobs.storage.spark_files import write_counted
from jobs.transforms.aggregate import aggregate, inputs_of_windows, slice_of
from jobs.transforms.deduplicate import first_arrivals

log = logging.getLogger(__name__)

_ROWS_PER_FILE = 5_000_000


def run(lake: PipelineLake, settings: Settings, run_id: str, try_name: str | None = None) -> None:
    """Compute and stage the slices of a run's plan.

    ``try_name``: the try that a task has begun. The task then puts the staged rows into the run. Without a name, this
    function begins a try, and puts its rows into the run itself.
    """
    pipeline, folder = lake.pipeline, RunFolder.of(lake, run_id)
    plan = folder.plan()
    if plan.fingerprint != pipeline.fingerprint:
        raise Refusal(
            f"the definition of {pipeline.name!r} has changed since run {run_id!r} was planned: clear its task plan"
        )
    own = Try(run=folder.path, name=try_name) if try_name else Try.begin(folder.path, plan.names)
    part = plan.only(own.slices())
    if part.has_windows:
        with stop_when_task_ends(own), session.opened(settings, f"recompute {pipeline.name}") as spark:
            own.write_result(stage(spark, lake, part, own))
    else:
        own.write_result({name: StagedSlice() for name in part.names})
    if not try_name:
        folder.keep_staged(own.result())
    may_fail_at(FailPoint.SLICES_STAGED, 0)


def stage(spark: SparkSession, lake: PipelineLake, plan: Plan, own: Try) -> dict[str, StagedSlice]:
    """Read the events at one pinned version, aggregate them, and write a folder per slice. Return each staged slice."""
    pipeline = lake.pipeline
    slices = plan.slices(pipeline)
    events = read_events(spark, lake, plan.events_version, slices)
    counts = _counts(events, pipeline, slices)
    inputs = F.count(F.lit(1)).alias(INPUTS)
    windows = aggregate(first_arrivals(events, pipeline.source), pipeline, inputs).where(within("window_start", slices))
    staged = own.staged_rows(_write(_stamped(spark, windows, plan), own.stage, pipeline))
    log.info("staged %d slices of %s from %d events", len(slices), pipeline.name, sum(r for r, _ in counts.values()))
    return {name: _staged(counts.get(name, (0, 0)), staged.get(name, (0, ()))) for name in plan.names}


def _staged(counts: tuple[int, int], written: tuple[int, tuple[str, ...]]) -> StagedSlice:
    (read, expected), (rows, files) = counts, written
    return StagedSlice(read=read, expected=expected, rows=rows, files=files)


def _counts(events: DataFrame, pipeline: Pipeline, slices: Sequence[Slice]) -> dict[str, tuple[int, int]]:
    """For each slice, how many events were read, and how many rows its windows must count."""
    own = slice_of(F.col("event_time"), pipeline.slice_seconds).alias("slice")
    read = events.where(within("event_time", slices)).select(own, F.lit(1).alias("read"), F.lit(0).alias("expected"))
    inputs = inputs_of_windows(first_arrivals(events, pipeline.source), pipeline)
    expected = inputs.where(within("window_start", slices)).select("slice", F.lit(0), F.lit(1))
    sums = read.union(expected).groupBy("slice").agg(F.sum("read").alias("read"), F.sum("expected").alias("expected"))
    return {row["slice"]: (row["read"], row["expected"]) for row in sums.collect()}


def read_events(spark: SparkSession, lake: PipelineLake, version: int, slices: Iterable[Slice]) -> DataFrame:
    """The accepted events that can fall into windows of these slices, at one version of their table."""
    source, landed = lake.pipeline.source, lake.events(version)
    if landed is None and lake.events() is None:
        raise Refusal(f"{source.events_table} is gone: restore it, then clear the task plan of the run")
    ranges = event_ranges(lake.pipeline, slices)
    files = landed.files(ranges) if landed else []
    if landed is None or landed.deleted(files):
        raise Refusal(
            f"version {version} of {source.events_table}, on which the run was planned, is gone: old versions are kept "
            "for some hours; clear the task plan of the run, or leave its slices to the next run"
        )
    rows = spark.read.schema(_columns(source)).parquet(*(str(landed.path / file) for file in files))
    return rows.where(F.col("reason").isNull() & _in_ranges("event_time", ranges)).drop("reason")


def within(column: str, slices: Iterable[Slice]) -> Column:
    """Whether a time lies in one of the slices."""
    return _in_ranges(column, [(touching[0].start_ms, touching[-1].end_ms) for touching in adjacent_groups(slices)])


def _in_ranges(column: str, ranges: Iterable[tuple[int, int]]) -> Column:
    times = F.col(column)
    between = [
        (times >= F.timestamp_millis(F.lit(from_))) & (times < F.timestamp_millis(F.lit(to))) for from_, to in ranges
    ]
    return reduce(or_, between, F.lit(False))


def _columns(source: Source) -> str:
    """The columns of `events` that recompute reads. Spark then does not have to look for them in the files."""
    own = ", ".join(f"`{field.name}` {field.type}" for field in source.columns)
    record = "topic STRING, partition INT, offset BIGINT, arrival_time TIMESTAMP, event_time TIMESTAMP"
    return f"{record}, {own}, reason STRING"


def _stamped(spark: SparkSession, windows: DataFrame, plan: Plan) -> DataFrame:
    """The windows with the version that each slice will get, and with the plan's time, run and fingerprint."""
    versions = {work.slice: work.version + 1 for work in plan.work}
    if len(set(versions.values())) == 1:
        versioned = windows.withColumn("version", F.lit(next(iter(versions.values()))).cast("bigint"))
    else:
        columns = pa.schema({"slice": pa.string(), "version": pa.int64()})
        rows = [{"slice": name, "version": version} for name, version in versions.items()]
        known = session.small_frame(spark, columns, rows)
        versioned = windows.join(F.broadcast(known), "slice")
    return versioned.withColumns(
        {
            "as_of": F.timestamp_millis(F.lit(plan.as_of_ms)),
            "run": F.lit(plan.run),
            "fingerprint": F.lit(plan.fingerprint),
        }
    )


def _write(windows: DataFrame, folder: Folder, pipeline: Pipeline) -> int:
    """Write each slice in order, one file per `_ROWS_PER_FILE` rows: the same rows give the same bytes."""
    order = ("slice", "window_start", *(f"`{key}`" for key in pipeline.keys))
    ordered = windows.repartition("slice").sortWithinPartitions(*order)
    return write_counted(ordered, "slice", folder, maxRecordsPerFile=_ROWS_PER_FILE)
