"""The tables that streaming jobs append to. The metadata of each commit has the offsets that it took per topic."""

import json
import logging
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import pyarrow as pa
from deltalake import DeltaTable, Schema, Transaction
from deltalake.exceptions import TableNotFoundError

from jobs.control.checkpoint import Offsets, reset_command
from jobs.failpoints import FailPoint, may_fail_at
from jobs.lake.batch_rows import files_about_batches, newest_watermark, to_remove, write_first_row
from jobs.lake.delta.fenced import HOUR_SECONDS, Action, FencedTable, kept_for, opened, set_properties
from jobs.lake.delta.log import commit_infos, open_whole
from jobs.lake.delta.manifest import Manifest
from jobs.lake.delta.reading import files_with_sizes, value_of
from jobs.lake.event_hours import KeptEvents, old_hours
from jobs.pipelines.layout import BATCHES_SLICE
from jobs.refusal import Refusal
from jobs.settings import replaced_kept_minutes
from jobs.storage.folders import Folder, remove
from jobs.storage.json_line import JsonLine
from jobs.times import iso

log = logging.getLogger(__name__)

COMPACT_EVERY_COMMITS = 60
DELETE_EVERY_SECONDS = HOUR_SECONDS
# The stages of a writer lie in a folder that is named by this prefix and the writer's epoch.
_EPOCH = "epoch-"
_PROPERTIES = {"delta.checkpointInterval": "50"}


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """The offsets that a commit took from one topic: [start, end) per partition."""

    topic_id: str
    offsets: dict[int, tuple[int, int]]

    def to_json(self) -> str:
        """Return only the ranges: {"partition": [start, end]}."""
        return json.dumps(self.offsets, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class Note(JsonLine):
    """The metadata of a commit, kept in its log entry (`userMetadata`).

    The note of a reset has no batch. Each of its ranges ends at the offset where the next checkpoint begins. A range of
    `ingest` covers the offsets that are never landed. Example: partition 0 is landed up to 100, and a reset lets
    `ingest` begin at 120. Then the range is [100, 120). A live job does not record what it passes over: if it begins at
    120, its range is [120, 120). ``write_id`` is the id of the checkpoint that the reset put aside.
    """

    job: str
    write_id: str
    batch: int | None
    epoch: int
    cluster_id: str
    topics: dict[str, Ranges]
    fingerprint: str | None = None
    # For `events` only: events that happened before this time were removed as too old. The table's writer sets it.
    events_from_ms: int = 0

    @property
    def is_reset(self) -> bool:
        """Whether the note belongs to a reset, not to a micro-batch."""
        return self.batch is None

    @property
    def transactions(self) -> list[Transaction]:
        """The transactions that let a batch be committed only once. A reset has none, so it may be repeated."""
        return [] if self.batch is None else [Transaction(self.write_id, self.batch)]

    @property
    def ends(self) -> Offsets:
        """The offset up to which the table has taken each topic, per partition; after a reset, where the job begins."""
        return {
            topic: {partition: end for partition, (_, end) in ranges.offsets.items()}
            for topic, ranges in self.topics.items()
        }

    def topic_id(self, topic: str) -> str | None:
        """Return the id of a topic as it was read last; None if the topic is not in the note."""
        ranges = self.topics.get(topic)
        return ranges.topic_id if ranges else None


def last_note(path: Folder, *, mends: bool = False) -> Note | None:
    """Return the newest note of a streaming job's table; None for a table that is new or missing.

    ``mends``: put aside the files of the log that a power cut has torn. Only the holder of the lease may do this.
    """
    try:
        return note_at(path, (open_whole(path) if mends else DeltaTable(str(path))).version())
    except TableNotFoundError:
        return None


def note_at(path: Folder, version: int) -> Note | None:
    """Return the newest note up to a version of a table. Later versions, which the log may have by now, are ignored."""
    notes = (info.get("userMetadata") for _, info in commit_infos(path, version))
    return next((Note.from_json(note) for note in notes if note), None)


class TableWriter(FencedTable):
    """The only writer of a stream's table, for as long as it holds the job's lease.

    Its next commit fails if another writer has committed since this writer read the table. ``note`` is the newest note
    that it has read or written. The paths of its stages contain the lease's ``epoch``. A writer removes only stages of
    earlier epochs, so a writer that was suspended does not remove those of its successor.
    """

    def __init__(self, path: Folder, table: DeltaTable, epoch: int) -> None:
        """Use `open`."""
        super().__init__(path, table)
        self.epoch = epoch
        self.note = note_at(path, self.version)
        # True if the table is empty and has other columns than the job writes. The first commit replaces its columns.
        self._adapts = False
        self._remove_older_stages()

    @classmethod
    def open(cls, path: Folder, schema: pa.Schema | None, partition: str, *, epoch: int) -> Self:
        """Open the table, or create it empty. Without a ``schema`` its columns stay; a new table gets them later."""
        first = pa.schema([(partition, pa.string())]) if schema is None else schema
        kept = _kept()
        table = opened(path, first, partition, _PROPERTIES | kept)
        set_properties(table, path, kept)
        writer = cls(path, table, epoch)
        if schema is not None:
            writer._adopt(schema)
        return writer

    @property
    def _stages(self) -> Folder:
        """The folder of files of this epoch that wait for their commits."""
        return self.staging / f"{_EPOCH}{self.epoch:010d}"

    def new_stage(self) -> Folder:
        """Return the path of a new folder for the files of one commit, to be written partitioned."""
        return self._stages / uuid.uuid4().hex

    def _remove_older_stages(self) -> None:
        """Remove stages of earlier epochs. A stage without an epoch was left by an earlier version of Tideline."""
        for folder in self.staging.iterdir() if self.staging.is_dir() else ():
            if not folder.name.startswith(_EPOCH) or folder.name < self._stages.name:
                remove(folder)

    def _adopt(self, schema: pa.Schema) -> None:
        """Write these columns from now on. A table without rows gets them; rows with other columns are refused."""
        wanted = Schema.from_arrow(schema)
        if not files_with_sizes(self._table):
            self._adapts = wanted != self._schema
            self._schema = wanted
            return
        old, new = _types(self._schema), _types(wanted)
        if list(old.items()) != list(new.items()):
            changed = [name for name in old if name in new and old[name] != new[name]]
            types = "".join(f"; {name} was {old[name]}, is {new[name]}" for name in changed)
            raise Refusal(
                f"{self.path} has the columns {list(old)}, the job writes {list(new)}{types}: the definition has "
                f"changed; take the change back (rows of `events` are never cleared), or clear a pipeline's live rows "
                f"with {reset_command('JOB')}"
            )

    def reset(self, note: Note, *, clear: bool) -> None:
        """Commit where the next checkpoint begins. With ``clear`` the same commit takes all rows out of the table."""
        self._commit_with_note([], note, overwrites=clear)

    def has(self, write_id: str, batch: int) -> bool:
        """Whether this batch is in the table already: Spark repeats a batch if it could not record its end."""
        done = self._table.transaction_version(write_id)
        return done is not None and done >= batch

    def commit(self, staged: Manifest, note: Note) -> list[Folder]:
        """Move the staged files into the table, make them visible at once, and return their new places."""
        added = self.place_all(staged)
        self._commit_with_note(added, note, overwrites=self._adapts)
        self._adapts = False
        return [self.path / action.path for action in added]

    def discard_stages(self) -> None:
        """Remove this writer's stages; only one is in use at a time. In a bucket the folder's marker goes, too."""
        remove(self._stages)

    def _commit_with_note(self, actions: Sequence[Action], note: Note, *, overwrites: bool) -> None:
        # Each note repeats the time before which events were removed. So the newest note of any version has it.
        note = replace(note, events_from_ms=self.note.events_from_ms if self.note else 0)
        self.transact(actions, note.to_json(), *note.transactions, overwrites=overwrites)
        self.note = note

    def prune(
        self,
        slices: Collection[str],
        batches_kept: timedelta | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Remove rows of these slices, and old rows about micro-batches, in one commit. Only live tables have both."""
        if self.note is None:
            return
        files = {
            file: size
            for file, size in files_with_sizes(self._table).items()
            if value_of(file) in slices and value_of(file) != BATCHES_SLICE
        }
        before, about_batches = datetime.min.replace(tzinfo=UTC), files_about_batches(self._table)
        if batches_kept and about_batches:
            # The driver checks its clock only at its start. The clock may be set ahead later.
            before = min(_now(), newest_watermark(self.path, about_batches)) - batches_kept
        old, first = to_remove(about_batches, before)
        files |= {file.path: file.size for file in old}
        if not files:
            return
        with self.staged() as stage:
            added = [self.place(write_first_row(self.path / first.path, stage))] if first else []
            before_commit()
            self.transact([*(self.removal(file, size) for file, size in files.items()), *added], self.note.to_json())
        log.info("pruned %d files of %s", len(files), self.path.name)

    def remove_old_events(self, events: KeptEvents, before_commit: Callable[[], None] = lambda: None) -> None:
        """Remove the oldest hours in one commit. Its note also has the time before which no events are left."""
        if self.note is None:
            return
        now_ms = round(_now().timestamp() * 1000)
        old, before_ms = old_hours(self._table, events.kept, events.needed_from_ms(), now_ms)
        if not old:
            return
        note = replace(self.note, events_from_ms=max(self.note.events_from_ms, before_ms))
        before_commit()
        self.transact([self.removal(file, size) for file, size in old.items()], note.to_json())
        self.note = note
        log.info("removed %d files of %s: events before %s", len(old), self.path.name, iso(note.events_from_ms))

    def maintain(
        self,
        superseded: Callable[[], Collection[str]] = tuple,
        *,
        batches_kept: timedelta | None = None,
        events: KeptEvents | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Now and then remove superseded slices, merge small files, and delete files that no reader needs.

        Rows about micro-batches older than ``batches_kept`` are removed, too. With ``events`` so are old events.
        ``check`` is called before each commit. It must raise if another process has taken over the lease.
        """
        version, note = self.version, self.note
        if note is None or version % COMPACT_EVERY_COMMITS:
            return
        batch = note.batch or 0

        def before_commit() -> None:
            may_fail_at(FailPoint.MERGED, batch)
            check()

        self.prune(superseded(), batches_kept, before_commit)
        if events:
            self.remove_old_events(events, before_commit)
            note = self.note or note
        yesterday = _now() - timedelta(days=1)
        # Files with rows older than a day are not merged: a file that kept growing could never be removed as a whole.
        settled = {file.path for file in files_about_batches(self._table) if file.oldest < yesterday}
        self.merge_small_files(note.to_json(), before_commit, without=settled)
        # Deletions run six times within the time that replaced files are kept. So files stay only a little longer.
        self.delete_now_and_then(min(DELETE_EVERY_SECONDS, replaced_kept_minutes() * 60 / 6))


def _kept() -> dict[str, str]:
    """How long replaced files and the log are kept, as properties of a table.

    A commit a second is 86,400 log files a day: keep hours of them, not the library's default of 30 days.
    """
    return kept_for(f"{replaced_kept_minutes()} minutes")


def _now() -> datetime:
    return datetime.now(UTC)


def _types(schema: Schema) -> dict[str, Any]:
    """The columns' types in Delta's names. Whether a column may be null is left out, because it makes no difference."""
    return {field["name"]: _bare(field["type"]) for field in json.loads(schema.to_json())["fields"]}


def _bare(info: Any) -> Any:
    if isinstance(info, dict):
        left_out = ("nullable", "containsNull", "valueContainsNull", "metadata")
        return {name: _bare(word) for name, word in info.items() if name not in left_out}
    return [_bare(word) for word in info] if isinstance(info, list) else info
