"""Write one micro-batch into one table: stage, commit with its offsets, then announce. Safe to run again."""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Lock

from kafka import KafkaAdminClient
from kafka.errors import KafkaError
from pyspark.sql import DataFrame

from jobs.broker.kafka import topic_ids
from jobs.control.checkpoint import Checkpoint, PlannedBatch
from jobs.control.lease import Lease
from jobs.control.room import Room
from jobs.failpoints import FailPoint, may_fail_at
from jobs.lake.delta.manifest import Manifest
from jobs.lake.event_hours import KeptEvents
from jobs.lake.stream_tables import Note, Ranges, TableWriter
from jobs.refusal import Refusal
from jobs.storage.folders import Folder
from jobs.streaming.start import Start
from jobs.streaming.torn_checkpoint import CheckpointFiles

log = logging.getLogger(__name__)

KAFKA_PATIENCE_SECONDS = 60.0
_LOOK_SECONDS = 0.5
# How often a stream looks for deletable files of its table while the disk is full. To list a table takes time.
_DELETE_SECONDS = 60.0


class ClosedError(Exception):
    """Spark began a micro-batch after the driver had decided to stop."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The micro-batch that a stage function writes."""

    number: int
    plan: PlannedBatch
    note: Note
    dropping_watermark_ms: int


@dataclass(kw_only=True)
class MicroBatches:
    """The `foreachBatch` function of one streaming query."""

    job: str
    topic: str
    lease: Lease
    checkpoint: Checkpoint
    table: TableWriter
    client: KafkaAdminClient
    # The topic when the driver started, and the offsets that the stream had reached.
    start: Start
    # Writes a micro-batch into a folder, and returns the number of its rows.
    stage: Callable[[DataFrame, Folder, Batch], int]
    # The fingerprint of the pipeline's definition; None for `ingest`.
    fingerprint: str | None = None
    announce: Callable[[list[Folder], Batch], None] | None = None
    # Returns the slices with rows that are not needed any more.
    superseded: Callable[[], Collection[str]] = tuple
    # How long rows about batches are kept; None: without end, or the table has no such rows.
    batches_kept: timedelta | None = None
    # How long events are kept; None: the table has other rows.
    events: KeptEvents | None = None
    room: Room | None = None
    waits_for_room: bool = False
    # The error that has ended the query.
    failure: Exception | None = None
    # Held while a micro-batch is written.
    running: Lock = field(default_factory=Lock)
    # The newest micro-batch that this driver has written; -1: none.
    finished: int = -1
    # The offsets that the stream has reached so far.
    reached: dict[int, int] = field(init=False)
    _checkpoint_files: CheckpointFiles = field(init=False)
    # The driver stops: no further micro-batch may begin.
    closed: bool = False
    # Spark began a micro-batch after that, and got a `ClosedError`. This is no failure of the query.
    turned_away: bool = False

    def __post_init__(self) -> None:
        """Set the offsets that the stream has reached: those of the last committed batch in its checkpoint, if any."""
        self._checkpoint_files = CheckpointFiles(self.checkpoint.path)
        last = self.checkpoint.last_committed()
        self.reached = self.start.reached if last is None else self.checkpoint.planned(last).ends[self.topic]

    def __call__(self, frame: DataFrame, number: int) -> None:
        """Write one micro-batch. An error ends the query, and is kept so that the driver can report it."""
        with self.running:
            try:
                self._await_room()
                if self.closed:
                    self.turned_away = True
                    raise ClosedError(f"batch {number} is left to the next start: this driver is stopping")
                self._write(frame, number)
                self.finished = number
            except ClosedError:
                raise
            except Exception as error:
                self.failure = error
                raise

    def close(self) -> None:
        """Wait for the micro-batch under way, and let no other begin."""
        self.closed = True
        with self.running:
            pass

    def _await_room(self) -> None:
        """Wait until the disk has room for a micro-batch, or until the driver must end."""
        delete_at = time.monotonic()
        while self.room and self.room.is_short() and not self.closed:
            if not self.waits_for_room:
                log.warning("the disk of the lake is full: %s waits", self.topic)
            self.waits_for_room = True
            self.lease.check()
            if time.monotonic() >= delete_at:
                self._make_room()
                delete_at = time.monotonic() + _DELETE_SECONDS
            time.sleep(_LOOK_SECONDS)
        self.waits_for_room = False

    def _make_room(self) -> None:
        try:
            self.table.delete_what_no_reader_needs()
        except OSError as error:
            # Files may have been deleted nevertheless: on a full disk only the record of the deletion cannot be
            # written.
            log.warning("old files of %s could not all be deleted: %s", self.table.path, error)

    def _write(self, frame: DataFrame, number: int) -> None:
        may_fail_at(FailPoint.PLANNED, number)
        self.lease.check()
        batch = self._batch(number)
        folder = self.table.new_stage()
        staged = Manifest.of(folder, self.stage(frame, folder, batch))
        may_fail_at(FailPoint.STAGED, number)
        files = self._commit(staged, batch)
        may_fail_at(FailPoint.TABLE_COMMITTED, number)
        if self.announce:
            # A driver that was suspended after its commit would send old numbers after its successor's newer ones.
            self.lease.check()
            self.announce(files, batch)
        self.reached = batch.note.ends[self.topic]
        self.table.discard_stages()
        self.lease.check()
        self.table.maintain(self.superseded, batches_kept=self.batches_kept, events=self.events, check=self.lease.check)

    def _commit(self, staged: Manifest, batch: Batch) -> list[Folder]:
        if self.table.has(batch.note.write_id, batch.number):
            log.info("batch %d is in %s already: it is not written again", batch.number, self.table.path.name)
            return list(staged.files)
        # Kafka and the disk may be slow, so the lease is checked last.
        self._check_topic()
        # Spark does not make its checkpoint durable. If a power cut tore the plan of a batch that the table has, the
        # plan could not be repaired, and the stream would be refused.
        self._checkpoint_files.make_durable()
        self.lease.check()
        return self.table.commit(staged, batch.note)

    def _batch(self, number: int) -> Batch:
        plan = self.checkpoint.planned(number)
        starts = self.checkpoint.starts(number).get(self.topic, {})
        ends = plan.ends[self.topic]
        ranges = {partition: (starts.get(partition, 0), end) for partition, end in sorted(ends.items())}
        note = Note(
            job=self.job,
            write_id=self.checkpoint.query_id(),
            batch=number,
            epoch=self.lease.epoch,
            cluster_id=self.start.topic.cluster_id,
            topics={self.topic: Ranges(topic_id=self.start.topic.topic_id, offsets=ranges)},
            fingerprint=self.fingerprint,
        )
        # Spark drops late events by the watermark of the batch before.
        late = self.checkpoint.planned(number - 1).watermark_ms if number else 0
        return Batch(number=number, plan=plan, note=note, dropping_watermark_ms=late)

    def _check_topic(self) -> None:
        """Refuse a topic that was re-created during the read. The records may be of the new topic."""
        deadline = time.monotonic() + KAFKA_PATIENCE_SECONDS
        while True:
            try:
                now = topic_ids(self.client, [self.topic]).get(self.topic)
                break
            except KafkaError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        if now != self.start.topic.topic_id:
            raise Refusal(
                f"topic {self.topic!r} was {'deleted' if now is None else 're-created'} while it was read: "
                f"nothing more is written; begin the new topic with {self.checkpoint.way_out}"
            )
