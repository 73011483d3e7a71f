"""Compares the live and final rows of slices with Spark, and finds the events that explain each difference."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from jobs import session
from jobs.finality.account_inputs import AccountInputs
from jobs.finality.recompute import read_events
from jobs.lake.columns import TIME
from jobs.lake.final import FinalTable
from jobs.lake.live import BatchRange
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.slices import Header
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import slice_named
from jobs.refusal import Refusal
from jobs.storage.folders import Folder
from jobs.storage.spark_files import write_counted
from jobs.transforms import drift
from jobs.transforms.aggregate import slice_of

_OF_LIVE = {"epoch": "BIGINT", "batch": "BIGINT", "as_of": "TIMESTAMP"}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result for some slices: rows for the balance table, and how many drift rows were staged."""

    totals: Sequence[Mapping[str, Any]] = ()
    drift_rows: int = 0


def compare(
    spark: SparkSession,
    lake: PipelineLake,
    run_id: str,
    inputs: AccountInputs,
    headers: Sequence[Header],
    ranges: Sequence[BatchRange],
    stage: Folder,
) -> Comparison:
    """Stage the drift rows of slices, and return the totals."""
    pipeline = lake.pipeline
    if inputs.landed is None:
        raise Refusal(
            f"{pipeline.source.events_table} is gone, and the account of final slices of {pipeline.name!r} needs it: "
            "restore it"
        )
    slices = [slice_named(pipeline, header.slice) for header in headers]
    events = read_events(spark, lake, inputs.landed.version, slices)
    finals = _finals(spark, pipeline, inputs, headers)
    transformed = drift.tagged(events, pipeline, _batches(spark, ranges), _width(ranges), finals).persist()
    names = {header.slice for header in headers}
    live = _rows(spark, pipeline, inputs.live.files(names), _OF_LIVE)
    final = _final_rows(spark, pipeline, inputs.final, names)
    balance = drift.balance(transformed, live, final, pipeline).persist()
    try:
        rows = drift.drift_rows(balance, finals, pipeline, run_id)
        ordered = rows.repartition("day").sortWithinPartitions("day", "window_start")
        staged = write_counted(ordered, "day", stage)
        by_slice = {row["slice"]: row for row in drift.totals(balance, pipeline).collect()}
        causes = drift.causes_by_slice(transformed, pipeline).collect()
    finally:
        balance.unpersist()
        transformed.unpersist()
    return Comparison(totals=_totals(headers, by_slice, causes), drift_rows=staged)


def _finals(spark: SparkSession, pipeline: Pipeline, inputs: AccountInputs, headers: Iterable[Header]) -> DataFrame:
    topic, offsets = pipeline.source.name, pa.map_(pa.int32(), pa.int64())
    stream = {"begins": list(inputs.live.begins(topic).items()), "reached": list(inputs.live.reached(topic).items())}
    columns = pa.schema({"slice": pa.string(), "version": pa.int64(), **dict.fromkeys(["offsets", *stream], offsets)})
    rows = [{"slice": h.slice, "version": h.version, "offsets": list(h.offsets.items()), **stream} for h in headers]
    return session.small_frame(spark, columns, rows)


def _batches(spark: SparkSession, ranges: Sequence[BatchRange]) -> DataFrame:
    columns = pa.schema({"partition": pa.int32(), "start": pa.int64(), "end": pa.int64(), "watermark": TIME})
    return session.small_frame(spark, columns, [vars(batch) for batch in ranges])


def _width(ranges: Iterable[BatchRange]) -> int:
    """The average length of a range of offsets.

    `drift` cuts each range at the multiples of this average. That gives at most about twice as many ranges. Example:
    the average of [0, 100) and [100, 400) is 200, and only the second range is cut, at 200.
    """
    sizes = [batch.end - batch.start for batch in ranges]
    return max(1, sum(sizes) // max(1, len(sizes)))


def _final_rows(spark: SparkSession, pipeline: Pipeline, final: FinalTable, slices: Collection[str]) -> DataFrame:
    own, folded = final.files_of(slices)
    rows = _rows(spark, pipeline, own, {})
    if not folded:
        return rows
    # Folded files also hold rows of other slices. The bounds let Spark skip most of those rows.
    start, wanted = F.col("window_start"), [slice_named(pipeline, name) for name in slices]
    bounds = start.between(F.lit(min(each.start for each in wanted)), F.lit(max(each.end for each in wanted)))
    of_slices = slice_of(start, pipeline.slice_seconds).isin(*slices)
    return rows.unionByName(_rows(spark, pipeline, folded, {}).where(bounds & of_slices))


def _rows(spark: SparkSession, pipeline: Pipeline, files: Sequence[str], more: Mapping[str, str]) -> DataFrame:
    values = dict(zip(pipeline.value_columns, pipeline.value_types, strict=True))
    types = {"window_start": "TIMESTAMP", "window_end": "TIMESTAMP", **values, **more}
    if files:
        return spark.read.schema(", ".join(f"`{name}` {type_}" for name, type_ in types.items())).parquet(*files)
    return spark.range(0).select(*(F.lit(None).cast(type_).alias(name) for name, type_ in types.items()))


def _totals(headers: Iterable[Header], by_slice: Mapping[str, Row], causes: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows of the balance table: one for each slice, for each cause in it, and for each measure and age."""
    versions, rows = {header.slice: header.version for header in headers}, []
    for slice_, version in versions.items():
        at, found = {"slice": slice_, "version": version}, by_slice.get(slice_)
        counts = {name: found[name] if found else 0 for name in ("windows", "differing", "unexplained")}
        rows.append({**at, "kind": "slice", **counts})
        rows += (
            [{**at, "kind": "age", "windows": counts["windows"], **age.asDict()} for age in found["ages"]]
            if found
            else []
        )
    rows += [{"version": versions[row["slice"]], "kind": "cause", **row.asDict()} for row in causes]
    return rows
