"""Reset a streaming job: choose where its next checkpoint begins, and clear or keep its rows. Plans first.

The rows of a live table are cleared. The rows of `ingest` stay: it only goes forward, and notes skipped records as
lost. First a commit of the table says where the next checkpoint begins; only then the old checkpoint is put aside. If
the reset is interrupted between the two, table and checkpoint disagree. Then a start is refused until the reset is done
again.
"""

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from deltalake import DeltaTable
from kafka import KafkaAdminClient, TopicPartition
from kafka.admin import OffsetSpec

from jobs.broker.kafka import TopicState, require
from jobs.control.checkpoint import Checkpoint
from jobs.control.epochs import Receipt
from jobs.control.folder import Control
from jobs.control.incident import lost_key
from jobs.control.incidents import Incidents
from jobs.control.lease import Lease
from jobs.failpoints import FailPoint, may_fail_at
from jobs.lake.delta.reading import rows_by_partition
from jobs.lake.stream_tables import Note, TableWriter, last_note
from jobs.pipelines import INGEST, PIPELINES, SOURCES
from jobs.pipelines.layout import ASIDE, BATCHES_SLICE, CHECKPOINTS, checkpoint_of
from jobs.pipelines.source import Source
from jobs.refusal import Refusal
from jobs.settings import Settings
from jobs.storage.folders import Folder
from jobs.storage.folders import move as move_folder
from jobs.streaming.reset_plan import Move, Query, QueryReset, Request, ResetPlan, To

Offsets = Mapping[int, int]


def plan(settings: Settings, client: KafkaAdminClient, request: Request) -> ResetPlan:
    """Plan the reset as of now; nothing is changed."""
    notes = {query.table: last_note(settings.lake_root / query.table) for query in _queries(request)}
    return _plan(settings, client, request, notes)


def apply(settings: Settings, client: KafkaAdminClient, request: Request) -> ResetPlan:
    """Reset under the job's lease, and return the plan that was carried out. A refused plan takes no epoch."""
    plan(settings, client, request)
    lease = Lease.acquire(Control.of(settings.lake_root, request.job), env={})
    try:
        planned = _apply(settings, client, request, lease)
    except BaseException as error:
        changed = _is_changed(settings.lake_root, request, lease.epoch)
        end = "failed halfway, run it again" if changed else "changed nothing"
        cause = f"the reset to {request.words} {end}: {str(error) or type(error).__name__}"
        lease.release(Receipt(time=time.time(), clean=not changed, cause=cause))
        raise
    starts = {
        query.query.source.name: {move.partition: move.start for move in query.moves} for query in planned.queries
    }
    lease.release(Receipt(time=time.time(), clean=True, cause=f"reset to {request.words}", offsets=starts))
    return planned


def _apply(settings: Settings, client: KafkaAdminClient, request: Request, lease: Lease) -> ResetPlan:
    """Plan the reset once more, and carry it out.

    The writers are opened first. An earlier holder of the lease may have been suspended. If it commits after this
    moment, the commit of the reset fails.
    """
    lake_root = settings.lake_root
    lease.check()
    writers = {
        query.table: TableWriter.open(lake_root / query.table, None, query.partition, epoch=lease.epoch)
        for query in _queries(request)
    }
    planned = _plan(settings, client, request, {table: writer.note for table, writer in writers.items()})
    for reset in planned.queries:
        lease.check()
        writers[reset.query.table].reset(reset.note(lease.epoch), clear=reset.query.clears)
        if loss := reset.loss(request.words):
            _report_loss(lake_root, reset.query.source, loss)
        may_fail_at(FailPoint.RESET_COMMITTED, 0)
        lease.check()
        _put_aside(lake_root, reset.query.folder)
    return planned


def _report_loss(lake_root: Folder, source: Source, loss: str) -> None:
    """Report the loss as an incident that is over at once: the operator who resets has acknowledged it."""
    incidents = Incidents.of(lake_root)
    incidents.open(lost_key(source.name), loss)
    incidents.close(lost_key(source.name), loss)


def _put_aside(lake_root: Folder, checkpoint: str) -> None:
    folder = lake_root / checkpoint
    if folder.exists():
        name = checkpoint.removeprefix(f"{CHECKPOINTS}/").replace("/", "-")
        move_folder(folder, lake_root / ASIDE / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")


def _is_changed(lake_root: Folder, request: Request, epoch: int) -> bool:
    """Whether a commit of this reset is in a table. Before such a commit no checkpoint is moved."""
    notes = [last_note(lake_root / query.table) for query in _queries(request)]
    return any(note is not None and note.is_reset and note.epoch == epoch for note in notes)


def _plan(
    settings: Settings, client: KafkaAdminClient, request: Request, notes: Mapping[str, Note | None]
) -> ResetPlan:
    """Plan from the newest notes of the tables. When a reset is carried out, its commits follow exactly these notes."""
    queries = list(_queries(request))
    topics = require(client, [query.source.name for query in queries])
    resets = (
        _reset_of(settings.lake_root, client, request, query, topics[query.source.name], notes[query.table])
        for query in queries
    )
    return ResetPlan(queries=tuple(resets))


def _queries(request: Request) -> Iterator[Query]:
    if request.job != INGEST:
        pipeline = PIPELINES[request.job]
        yield Query(
            job=pipeline.name,
            source=pipeline.source,
            table=pipeline.live_table,
            partition="slice",
            folder=checkpoint_of(pipeline.name),
            fingerprint=pipeline.fingerprint,
        )
        return
    for name in request.sources or SOURCES:
        yield Query(
            job=INGEST,
            source=SOURCES[name],
            table=SOURCES[name].events_table,
            partition="hour",
            folder=checkpoint_of(INGEST, name),
        )


def _reset_of(
    lake_root: Folder, client: KafkaAdminClient, request: Request, query: Query, topic: TopicState, note: Note | None
) -> QueryReset:
    checkpoint = Checkpoint(lake_root / query.folder)
    table_ends = _table_ends(note, query.source, topic)
    starts = _starts(lake_root, client, request, query.source, topic)
    if not query.clears:
        _refuse_to_land_twice(query.source, table_ends, topic)
        starts = {partition: max(start, table_ends.get(partition, 0)) for partition, start in starts.items()}
    state, write_id = _state_of(checkpoint)
    return QueryReset(
        query=query,
        topic=topic,
        moves=tuple(Move(partition=p, table_end=table_ends.get(p), start=start) for p, start in sorted(starts.items())),
        rows=_rows(lake_root / query.table),
        checkpoint=state,
        # A missing checkpoint may come back from a backup, so its identity stays known from the table.
        write_id=write_id or (note.write_id if note else ""),
    )


def _table_ends(note: Note | None, source: Source, topic: TopicState) -> Offsets:
    """The end offsets of the table in this very topic. A deleted topic of the same name does not count."""
    ranges = note.topics.get(source.name) if note and note.cluster_id == topic.cluster_id else None
    return note.ends[source.name] if note and ranges and ranges.topic_id == topic.topic_id else {}


def _starts(
    lake_root: Folder, client: KafkaAdminClient, request: Request, source: Source, topic: TopicState
) -> dict[int, int]:
    """The target of every partition, within the offsets that the topic holds: Spark cannot begin elsewhere."""
    partitions = [TopicPartition(source.name, number) for number in topic.latest]
    # Spark cannot read beyond the begin of an open transaction, so a stream cannot begin after it.
    ends = _offsets(client, dict.fromkeys(partitions, OffsetSpec.LATEST))
    wanted: Offsets = {}
    if request.to is To.LATEST:
        wanted = ends
    elif request.timestamp_ms is not None:
        found = _offsets(client, dict.fromkeys(partitions, request.timestamp_ms))
        # Without a record at or after that time, the stream begins at the end.
        wanted = {partition: offset if offset >= 0 else ends[partition] for partition, offset in found.items()}
    elif request.to is To.LANDED:
        wanted = _table_ends(last_note(lake_root / source.events_table), source, topic)
        if not wanted:
            raise Refusal(
                f"nothing of topic {source.name!r} is landed, so --to landed has no offset to begin at: run `ingest` "
                "first, or choose --to earliest or --to latest"
            )
    return {
        partition: min(max(wanted.get(partition, 0), begin), max(ends[partition], begin))
        for partition, begin in topic.earliest.items()
    }


def _offsets(client: KafkaAdminClient, wanted: Mapping[TopicPartition, Any]) -> dict[int, int]:
    """Offsets as a reader of committed records sees them."""
    found = client.list_partition_offsets(dict(wanted), isolation_level="read_committed")
    return {at.partition: answer.offset for at, answer in found.items()}


def _refuse_to_land_twice(source: Source, landed: Offsets, topic: TopicState) -> None:
    for partition, end in landed.items():
        if topic.latest.get(partition, 0) < end:
            raise Refusal(
                f"topic {source.name!r} partition {partition} ends at {topic.latest.get(partition, 0)}, but its table "
                f"has the records before {end}: the topic lost records, and new records would get the same offsets; "
                "re-create the topic, then reset"
            )


def _state_of(checkpoint: Checkpoint) -> tuple[str | None, str]:
    """The state of a checkpoint in words, and its write identity; empty if the checkpoint is missing or damaged."""
    if not checkpoint.path.exists():
        return None, ""
    try:
        checkpoint.check()
        return (
            f"batch {checkpoint.last_planned()} planned, {checkpoint.last_committed()} committed",
            checkpoint.query_id(),
        )
    except Refusal:
        return "damaged", ""


def _rows(table: Folder) -> int:
    if not DeltaTable.is_deltatable(str(table)):
        return 0
    rows = rows_by_partition(DeltaTable(str(table)))
    return rows.total() - rows[BATCHES_SLICE]
