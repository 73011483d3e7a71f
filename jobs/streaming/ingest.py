"""`ingest`: land every source topic in `events/<source>` exactly once; rejected records carry their reason."""

import logging
import threading
import time
from collections.abc import Mapping
from datetime import timedelta

from kafka import KafkaAdminClient
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from jobs import session
from jobs.broker import streams
from jobs.broker.clock import check_clock
from jobs.broker.kafka import TopicState, admin, committed_ends, require
from jobs.control.checkpoint import Checkpoint
from jobs.control.events_needed import first_needed_ms, needed_from
from jobs.control.lease import Lease
from jobs.control.room import Room
from jobs.lake.event_hours import KeptEvents
from jobs.lake.stream_tables import TableWriter, last_note
from jobs.pipelines import INGEST, SOURCES
from jobs.pipelines.days import DAY_MS
from jobs.pipelines.layout import SPARK_HOUR_FORMAT
from jobs.pipelines.source import Source
from jobs.settings import Settings
from jobs.storage.folders import Folder
from jobs.storage.spark_files import write_counted
from jobs.streaming import driver
from jobs.streaming.microbatch import Batch, MicroBatches
from jobs.streaming.start import CheckpointProgress, Start, check_start
from jobs.streaming.torn_checkpoint import mend
from jobs.times import iso
from jobs.transforms.parse import parse

log = logging.getLogger(__name__)


def run(settings: Settings, *, until_caught_up: bool = False) -> None:
    """Land records until stopped, or until the topics are drained."""

    def work(lease: Lease, stop: threading.Event) -> driver.Ending:
        with admin(settings.kafka) as client:
            topics = require(client, SOURCES)
            check_clock(client, settings.kafka)
            lease.check()
            starts = {source.name: _check(settings, source, topics) for source in SOURCES.values()}
            with session.opened(settings, INGEST) as spark:
                lease.update_heartbeat(ui=session.ui_of(spark))
                return _run_queries(spark, settings, lease, client, starts, stop, until_caught_up)

    driver.supervised(settings, INGEST, work)


def _check(settings: Settings, source: Source, topics: dict[str, TopicState]) -> Start:
    checkpoint = Checkpoint.of(settings.lake_root, INGEST, source.name)
    note = last_note(settings.lake_root / source.events_table, mends=True)
    mend(checkpoint, note)
    check_start(INGEST, CheckpointProgress.read(checkpoint), note, topics, source=source.name)
    return Start.of(source.name, topics, note)


def _run_queries(
    spark: SparkSession,
    settings: Settings,
    lease: Lease,
    client: KafkaAdminClient,
    starts: Mapping[str, Start],
    stop: threading.Event,
    until_caught_up: bool,
) -> driver.Ending:
    def start(source: Source) -> tuple[StreamingQuery, MicroBatches]:
        begins, max_offsets = starts[source.name].begins, settings.max_offsets
        records = streams.read(spark, settings.kafka, source.name, max_offsets=max_offsets, begins=begins)
        events = landed(records, source)
        path, schema = settings.lake_root / source.events_table, streams.arrow_schema(events)
        # Check the lease before the table is opened, because opening may write to the table.
        lease.check()
        batches = MicroBatches(
            job=INGEST,
            topic=source.name,
            lease=lease,
            checkpoint=Checkpoint.of(settings.lake_root, INGEST, source.name),
            table=TableWriter.open(path, schema, "hour", epoch=lease.epoch),
            client=client,
            start=starts[source.name],
            stage=_stage,
            events=_kept(settings.lake_root, source),
            room=Room.of(settings.lake_root),
        )
        writer = events.writeStream.queryName(f"{INGEST} {source.name}")
        return driver.start_query(writer, batches, None if until_caught_up else settings.ingest_trigger_ms)

    queries = [start(source) for source in SOURCES.values()]
    return driver.run(queries, lease, stop, lambda: committed_ends(client, SOURCES))


def _kept(lake_root: Folder, source: Source) -> KeptEvents:
    """How long events are kept: for ``events_kept_days`` of their source, and longer while a pipeline needs them."""
    kept, told_at = timedelta(days=source.events_kept_days), dict[str, float]()

    def needed_from_ms() -> int:
        needed, now = needed_from(lake_root, source), time.time()
        for job, from_ms in needed.items():
            # A job that has run, but has not written yet which events it needs, has the time 0.
            is_old = 0 < from_ms < round((now - kept.total_seconds()) * 1000) - DAY_MS
            if is_old and now - told_at.get(job, 0.0) > DAY_MS / 1000:
                told_at[job] = now
                log.warning(
                    "%s still needs events of %s from %s on: they are kept for longer than events_kept_days=%d",
                    *(job, source.name, iso(from_ms), source.events_kept_days),
                )
        return first_needed_ms(needed)

    return KeptEvents(kept=kept, needed_from_ms=needed_from_ms)


def landed(records: DataFrame, source: Source) -> DataFrame:
    """A source's records with the columns of their table, which is partitioned by ``hour``.

    That is the hour of the event time, or of the arrival for a record without an event time.
    """
    hour = F.date_format(F.coalesce("event_time", "arrival_time"), SPARK_HOUR_FORMAT)
    return parse(records, source).withColumn("hour", hour)


def _stage(events: DataFrame, folder: Folder, _batch: Batch) -> int:
    return write_counted(events, "hour", folder)
