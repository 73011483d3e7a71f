"""A pipeline's live job: it writes live rows of every window as soon as events come."""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta

import pyarrow as pa
from kafka import KafkaAdminClient
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from jobs import session
from jobs.broker import streams
from jobs.broker.clock import check_clock
from jobs.broker.kafka import admin, committed_ends, require
from jobs.control.checkpoint import Checkpoint
from jobs.control.lease import Lease
from jobs.control.room import Room
from jobs.lake.columns import live_schema
from jobs.lake.live import Live, PruneRequest
from jobs.lake.stream_tables import TableWriter, last_note
from jobs.pipelines.days import DAY_MS
from jobs.pipelines.layout import BATCHES_SLICE
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import start_ms_of
from jobs.settings import Settings, binding_conf
from jobs.storage.documents import Documents
from jobs.storage.folders import Folder
from jobs.storage.parquet import write
from jobs.storage.spark_files import write_counted
from jobs.streaming import driver
from jobs.streaming.microbatch import Batch, MicroBatches
from jobs.streaming.start import CheckpointProgress, Start, check_start
from jobs.streaming.torn_checkpoint import mend
from jobs.transforms.aggregate import aggregate, is_ahead
from jobs.transforms.messages import messages
from jobs.transforms.parse import accepted

log = logging.getLogger(__name__)


def run(settings: Settings, pipeline: Pipeline, *, until_caught_up: bool = False) -> None:
    """Keep the pipeline's windows up to date until stopped, or until the topic is drained."""

    def work(lease: Lease, stop: threading.Event) -> driver.Ending:
        with admin(settings.kafka) as client:
            start = _check(settings, pipeline, client, lease)
            with session.opened(settings, pipeline.name) as spark:
                lease.update_heartbeat(ui=session.ui_of(spark))
                return _run_query(spark, settings, pipeline, lease, client, start, stop, until_caught_up)

    driver.supervised(settings, pipeline.name, work)


def _check(settings: Settings, pipeline: Pipeline, client: KafkaAdminClient, lease: Lease) -> Start:
    topics = require(client, [pipeline.source.name, pipeline.output])
    check_clock(client, settings.kafka)
    checkpoint = Checkpoint.of(settings.lake_root, pipeline.name)
    lease.check()
    note = last_note(settings.lake_root / pipeline.live_table, mends=True)
    mend(checkpoint, note)
    check_start(
        pipeline.name,
        CheckpointProgress.read(checkpoint),
        note,
        topics,
        fingerprint=pipeline.fingerprint,
        conf=binding_conf(settings),
    )
    return Start.of(pipeline.source.name, topics, note)


def events_that_count(records: DataFrame, pipeline: Pipeline) -> DataFrame:
    """The accepted records that are not too far ahead of their arrival. The watermark will drop those that are late."""
    events = accepted(records, pipeline.source).where(~is_ahead(pipeline))
    return events.withWatermark("event_time", f"{pipeline.watermark_delay_seconds} seconds")


def _run_query(
    spark: SparkSession,
    settings: Settings,
    pipeline: Pipeline,
    lease: Lease,
    client: KafkaAdminClient,
    start: Start,
    stop: threading.Event,
    until_caught_up: bool,
) -> driver.Ending:
    # By default Spark runs a batch without data when the watermark has moved. In update mode such a batch gives no
    # rows, and would only delay the next batch with data.
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    source, max_offsets = pipeline.source.name, settings.max_offsets
    records = streams.read(spark, settings.kafka, source, max_offsets=max_offsets, begins=start.begins)
    windows = aggregate(events_that_count(records, pipeline), pipeline)

    def announce(files: list[Folder], batch: Batch) -> None:
        rows = [str(file) for file in files if file.parent.name != f"slice={BATCHES_SLICE}"]
        if rows:
            live = spark.read.schema(_rows(windows, lease, batch, pipeline).schema).parquet(*rows)
            live = live.withColumns({"finality": F.lit("live"), "version": F.lit(0)})
            streams.send(messages(live, pipeline), settings.kafka, pipeline.output)

    def stage(updates: DataFrame, folder: Folder, batch: Batch) -> int:
        rows = write_counted(_rows(updates, lease, batch, pipeline), "slice", folder)
        _write_batch_row(folder, lease, batch, pipeline)
        return rows + 1

    path, schema = settings.lake_root / pipeline.live_table, live_schema(pipeline)
    # Check the lease before the table is opened, because opening may write to the table.
    lease.check()

    batches = MicroBatches(
        job=pipeline.name,
        topic=source,
        fingerprint=pipeline.fingerprint,
        lease=lease,
        checkpoint=Checkpoint.of(settings.lake_root, pipeline.name),
        table=TableWriter.open(path, schema, "slice", epoch=lease.epoch),
        client=client,
        start=start,
        stage=stage,
        announce=announce,
        superseded=_superseded(settings, pipeline, lease.control.documents),
        batches_kept=_batches_kept(pipeline),
        room=Room.of(settings.lake_root),
    )
    writer = windows.writeStream.queryName(pipeline.name).outputMode("update")
    query = driver.start_query(writer, batches, None if until_caught_up else settings.trigger_ms)
    return driver.run([query], lease, stop, lambda: committed_ends(client, [source]))


def _superseded(settings: Settings, pipeline: Pipeline, documents: Documents) -> Callable[[], Collection[str]]:
    """Return a function that returns the slices whose rows are not needed any more.

    Once a day it warns if rows of other slices have stayed for a day longer than they should. Then the table grows.
    """
    kept_ms, looked_at = settings.live_kept_seconds * 1000 + DAY_MS, -math.inf

    def superseded() -> Collection[str]:
        nonlocal looked_at
        asked = PruneRequest.read(documents)
        if time.monotonic() - looked_at > DAY_MS / 1000:
            looked_at = time.monotonic()
            slices = Live.at(settings.lake_root, pipeline).slices()
            # Of earlier slices some can never become final, and their rows stay.
            first = min((name for name in slices if name >= asked.before), default=None)
            # The newest slice shows how late it is.
            if first and start_ms_of(max(slices)) - start_ms_of(first) - pipeline.slice_seconds * 1000 > kept_ms:
                log.warning(
                    "live rows of %s from slice %s on are not removed, so the table grows: a slice loses them when it "
                    "is final and accounted for; unpause the DAGs %s and %s, or, if this slice is blocked, approve or "
                    "restate it",
                    *(pipeline.name, first, pipeline.recompute_job, pipeline.account_job),
                )
        return asked.slices

    return superseded


def _batches_kept(pipeline: Pipeline) -> timedelta:
    """How long rows about micro-batches are kept: as long as an account may need them.

    An accepted event can reopen its slice until the horizon has passed. A day is added, because an account may be
    delayed.
    """
    return timedelta(hours=pipeline.source.horizon_hours + 24, seconds=pipeline.slice_seconds)


def _rows(windows: DataFrame, lease: Lease, batch: Batch, pipeline: Pipeline) -> DataFrame:
    return windows.withColumns(
        {
            "epoch": F.lit(lease.epoch).cast("bigint"),
            "batch": F.lit(batch.number).cast("bigint"),
            # The time at which the batch was planned, which stays the same when the batch is run again.
            "as_of": F.timestamp_millis(F.lit(batch.plan.timestamp_ms)),
            "fingerprint": F.lit(pipeline.fingerprint),
        }
    )


def _write_batch_row(folder: Folder, lease: Lease, batch: Batch, pipeline: Pipeline) -> None:
    (ranges,) = batch.note.topics.values()
    time = pa.timestamp("us", tz="UTC")
    row = {
        "epoch": pa.array([lease.epoch], pa.int64()),
        "batch": pa.array([batch.number], pa.int64()),
        "as_of": pa.array([batch.plan.timestamp_ms * 1000], time),
        "fingerprint": [pipeline.fingerprint],
        "offsets": [ranges.to_json()],
        "watermark": pa.array([batch.dropping_watermark_ms * 1000], time),
    }
    file = folder / f"slice={BATCHES_SLICE}" / "batch.parquet"
    write(pa.table(row), file)
