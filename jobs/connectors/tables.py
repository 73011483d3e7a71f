"""Delta tables with one writer each: files are staged first, then committed by one entry in the log.

The commit is delta-rs's, without retries: it succeeds only on the version that this writer has seen last. So a
driver that slept while its successor wrote cannot commit any more, whatever it believes about its lease.
"""

import json
import logging
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from decimal import Decimal
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Self

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from jobs.connectors.checkpoint import Offsets, reset_command
from jobs.failpoints import FailPoint, reach
from jobs.refusal import Refusal

log = logging.getLogger(__name__)

COMPACT_EVERY_COMMITS = 60
VACUUM_EVERY_COMMITS = 1200
SMALL_FILE_BYTES = 32 * 1024 * 1024
_PROPERTIES = {
    # A commit a second is 86,400 log files a day: keep hours of them, not the default of 30 days.
    "delta.logRetentionDuration": "interval 6 hours",
    "delta.deletedFileRetentionDuration": "interval 6 hours",
    "delta.checkpointInterval": "50",
}


class OvertakenError(Refusal):
    """Somebody else has written the table: this writer must end."""


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """What a commit took from one topic: [start, end) per partition."""

    topic_id: str
    offsets: dict[int, tuple[int, int]]

    def to_json(self) -> str:
        """The ranges alone: {"partition": [start, end]}."""
        return json.dumps(self.offsets, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class Note:
    """What every commit says of itself, in the log entry itself (`userMetadata`).

    A reset has no batch: its ends are where the next checkpoint begins, its ranges are what will never be landed, and
    its write identity is that of the checkpoint which it put aside.
    """

    job: str
    write_id: str
    batch: int | None
    epoch: int
    cluster_id: str
    topics: dict[str, Ranges]
    fingerprint: str | None = None

    @property
    def is_reset(self) -> bool:
        """Whether it belongs to a reset, not to a micro-batch."""
        return self.batch is None

    @property
    def transactions(self) -> list[Transaction]:
        """What makes a batch happen once; a reset may happen again."""
        return [] if self.batch is None else [Transaction(self.write_id, self.batch)]

    @property
    def ends(self) -> Offsets:
        """How far each topic is landed."""
        return {
            topic: {partition: end for partition, (_, end) in ranges.offsets.items()}
            for topic, ranges in self.topics.items()
        }

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read `to_json` back."""
        fields = json.loads(text)
        topics = {
            topic: Ranges(
                topic_id=ranges["topic_id"],
                offsets={int(partition): (start, end) for partition, (start, end) in ranges["offsets"].items()},
            )
            for topic, ranges in fields.pop("topics").items()
        }
        return cls(topics=topics, **fields)


def last_note(path: Path) -> Note | None:
    """What the newest commit of a streaming job says; none for a table that is new or not there."""
    try:
        return _last_note(DeltaTable(path))
    except TableNotFoundError:
        return None


def _last_note(table: DeltaTable) -> Note | None:
    notes = (entry.get("userMetadata") for entry in table.history(20))
    return next((Note.from_json(note) for note in notes if note), None)


class TableWriter:
    """The one writer of a table, for as long as it holds the job's lease.

    Its ``note`` is the newest of the version on which alone its next commit succeeds.
    """

    def __init__(self, path: Path, table: DeltaTable) -> None:
        """Use `open`."""
        self.path = path
        self._table = table
        self.note = _last_note(table)
        self._schema = table.schema()
        # For a table that is empty: the first commit brings its columns.
        self._adapts = False
        (self._partition,) = table.metadata().partition_columns
        shutil.rmtree(self._staging, ignore_errors=True)

    @classmethod
    def open(cls, path: Path, schema: pa.Schema | None, partition: str) -> Self:
        """Open the table, or create it empty; without a schema as it is, with columns that are yet to come."""
        first = pa.schema([(partition, pa.string())]) if schema is None else schema
        table = DeltaTable.create(
            path, schema=first, partition_by=[partition], mode="ignore", configuration=_PROPERTIES
        )
        writer = cls(path, table)
        if schema is not None:
            writer._take(schema)
        return writer

    def _take(self, schema: pa.Schema) -> None:
        """Write these columns from now on: a table without rows adapts."""
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

    @property
    def _staging(self) -> Path:
        # Readers and vacuum pass over names that begin with an underscore.
        return self.path / "_staging"

    def new_stage(self) -> Path:
        """A fresh folder for the files of one commit, to be written partitioned."""
        return self._staging / uuid.uuid4().hex

    def reset(self, note: Note, *, clear: bool) -> None:
        """Say where the next checkpoint begins; ``clear`` takes every row out of the table in the same commit."""
        self._transact([], note, mode="overwrite" if clear else "append")

    def has(self, write_id: str, batch: int) -> bool:
        """Whether this batch is in the table already: Spark runs a batch again if it died before saying so."""
        done = self._table.transaction_version(write_id)
        return done is not None and done >= batch

    def commit(self, stage: Path, note: Note) -> list[Path]:
        """Move the staged files into the table, make them visible at once, and say where they are now."""
        added = [self._place(file) for file in sorted(stage.rglob("*.parquet"))]
        mode: Literal["append", "overwrite"] = "overwrite" if self._adapts else "append"
        self._transact(added, note, *note.transactions, mode=mode)
        self._adapts = False
        return [self.path / action.path for action in added]

    def discard(self, stage: Path) -> None:
        """Remove what is left of a stage."""
        shutil.rmtree(stage, ignore_errors=True)

    def _transact(
        self,
        actions: Sequence[AddAction | RemoveAction],
        note: Note,
        *transactions: Transaction,
        mode: Literal["append", "overwrite"] = "append",
    ) -> None:
        """Overwriting removes all files that are not among the actions, and sets the columns."""
        signed = _signed(note, *transactions)
        try:
            self._table.create_write_transaction(
                list(actions), mode, self._schema, [self._partition], commit_properties=signed
            )
        except CommitFailedError as error:
            raise OvertakenError(f"another writer has committed to {self.path}: this driver ends") from error
        self.note = note
        self._see_own_commit()

    def _see_own_commit(self) -> None:
        before = self._table.version()
        self._table.update_incremental()
        if self._table.version() != before + 1:
            raise OvertakenError(f"{self.path} went from version {before} to {self._table.version()} in one commit")

    def _place(self, file: Path, *, data_change: bool = True) -> AddAction:
        partition, value = file.parent.name.split("=", 1)
        folder = self.path / file.parent.name
        folder.mkdir(exist_ok=True)
        placed = file.rename(folder / f"{uuid.uuid4().hex}.parquet")
        return AddAction(
            path=f"{folder.name}/{placed.name}",
            size=placed.stat().st_size,
            partition_values={partition: value},
            modification_time=int(time.time() * 1000),
            data_change=data_change,
            stats=json.dumps(_stats(pq.read_metadata(placed))),
        )

    def tend(self) -> None:
        """Now and then: merge small files, and delete what no reader can need any more."""
        version = self._table.version()
        if self.note is None or version % COMPACT_EVERY_COMMITS:
            return
        self._merge_small_files(self.note)
        if version % VACUUM_EVERY_COMMITS == 0:
            self._delete_what_no_reader_needs()

    def _delete_what_no_reader_needs(self) -> None:
        # By the library's list, not by its own hand: it would put entries into the log, over a successor's.
        files = self._table.vacuum(dry_run=True)
        # Looked up beside this writer's own version: that one fences its next commit.
        if DeltaTable(self.path).version() != self._table.version():
            raise OvertakenError(f"another writer has committed to {self.path}: this driver deletes nothing")
        for file in files:
            (self.path / file).unlink(missing_ok=True)

    def _merge_small_files(self, note: Note) -> None:
        """By a commit that is fenced as any other.

        The library's own is not: of files that two writers merge at a time it keeps both results, every row twice.
        """
        began, stage, actions = time.monotonic(), self.new_stage(), list[AddAction | RemoveAction]()
        for number, files in enumerate(_bins(files_with_sizes(self._table))):
            folder = stage / str(number) / Path(next(iter(files))).parent.name
            rows = _dataset(self._table, self.path, files)
            columns = [name for name in rows.schema.names if name != self._partition]
            ds.write_dataset(rows.scanner(columns=columns), folder, format="parquet", min_rows_per_group=100_000)
            actions += [self._place(file, data_change=False) for file in sorted(folder.glob("*.parquet"))]
            actions += [self._removal(file, size) for file, size in files.items()]
        reach(FailPoint.MERGED, note.batch or 0)
        if actions:
            self._transact(actions, note)
        self.discard(stage)
        removed = sum(isinstance(action, RemoveAction) for action in actions)
        seconds = time.monotonic() - began
        log.info("merged %d files of %s into %d in %.1f s", removed, self.path.name, len(actions) - removed, seconds)

    def _removal(self, file: str, size: int) -> RemoveAction:
        partition, value = Path(file).parent.name.split("=", 1)
        return RemoveAction(file, False, int(time.time() * 1000), size, {partition: value})


def files_of(table: DeltaTable, path: Path) -> ds.Dataset:
    """What is in a table now, to be read: its files and their partitions, but not the log's statistics of them.

    The Delta library makes of a bound that is not there one that no value meets: rows would be missing. Parquet has
    statistics of its own.
    """
    return _dataset(table, path, files_with_sizes(table))


def files_with_sizes(table: DeltaTable) -> dict[str, int]:
    """The files that a table consists of, relative to its folder."""
    actions = pa.table(table.get_add_actions(flatten=True))
    if not actions.num_rows:
        return {}
    return dict(zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True))


def _types(schema: Schema) -> dict[str, Any]:
    """The columns' types, in Delta's words; whether they may be null is left out."""
    return {field["name"]: _bare(field["type"]) for field in json.loads(schema.to_json())["fields"]}


def _bare(words: Any) -> Any:
    if isinstance(words, dict):
        left_out = ("nullable", "containsNull", "valueContainsNull", "metadata")
        return {name: _bare(word) for name, word in words.items() if name not in left_out}
    return [_bare(word) for word in words] if isinstance(words, list) else words


def rows_by_partition(table: DeltaTable) -> Counter[str]:
    """How many rows there are, by the value of the partition column."""
    actions = pa.table(table.get_add_actions(flatten=True))
    rows = Counter[str]()
    if actions.num_rows:
        for path, count in zip(actions["path"].to_pylist(), actions["num_records"].to_pylist(), strict=True):
            rows[Path(path).parent.name.partition("=")[2]] += count
    return rows


def _dataset(table: DeltaTable, path: Path, files: Iterable[str]) -> ds.Dataset:
    # Arrow's own file system: the one of the Delta library ends a process noisily.
    folder, parquet = SubTreeFileSystem(str(path), LocalFileSystem()), ds.ParquetFileFormat()
    partitions = {file: Path(file).parent.name.split("=", 1) for file in files}
    fragments = [parquet.make_fragment(file, folder, ds.field(p) == value) for file, (p, value) in partitions.items()]
    # Rows about batches have no window: what a plan calls never null is so only in its own rows.
    schema = pa.schema([field.with_nullable(True) for field in pa.schema(table.schema().to_arrow())])
    return ds.FileSystemDataset(fragments, schema, parquet, folder)


def _bins(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Files to merge: of one partition, two at least, and no more than make a file of a good size."""
    by_folder = sorted(sizes.items(), key=lambda item: (Path(item[0]).parent.name, item[1]))
    for _, group in groupby(by_folder, key=lambda item: Path(item[0]).parent.name):
        found: dict[str, int] = {}
        for file, size in group:
            if sum(found.values()) + size > SMALL_FILE_BYTES:
                if len(found) > 1:
                    yield found
                found = {}
            found[file] = size
        if len(found) > 1:
            yield found


def _signed(note: Note, *transactions: Transaction) -> CommitProperties:
    return CommitProperties(
        custom_metadata={"userMetadata": note.to_json()},
        max_commit_retries=0,
        app_transactions=list(transactions) or None,
    )


def _stats(footer: pq.FileMetaData) -> dict[str, Any]:
    """Delta's statistics of a file from its parquet footer, so that readers can pass over it.

    Bounds without a count of nulls would tell readers that there are none: a column has both or neither.
    """
    lows: dict[str, Any] = {}
    highs: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    unknown: set[str] = set()
    for group in range(footer.num_row_groups):
        for index in range(footer.num_columns):
            column = footer.row_group(group).column(index)
            name, bounds = column.path_in_schema, column.statistics
            if "." in name or bounds is None or not bounds.has_null_count:
                unknown.add(name)
                continue
            nulls[name] = nulls.get(name, 0) + bounds.null_count
            if bounds.has_min_max:
                lows[name] = min(lows.get(name, bounds.min), bounds.min)
                highs[name] = max(highs.get(name, bounds.max), bounds.max)
            elif bounds.null_count < column.num_values:
                unknown.add(name)
    return {
        "numRecords": footer.num_rows,
        "minValues": _as_json(lows, unknown),
        "maxValues": _as_json(highs, unknown),
        "nullCount": {name: count for name, count in nulls.items() if name not in unknown},
    }


def _as_json(bounds: Mapping[str, Any], unknown: set[str]) -> dict[str, Any]:
    written = {name: _bound(value) for name, value in bounds.items() if name not in unknown}
    return {name: value for name, value in written.items() if value is not None}


def _bound(value: Any) -> Any:
    if isinstance(value, bool | int):
        return value
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    if isinstance(value, Decimal):
        return None  # JSON readers would make it a DOUBLE.
    return value if isinstance(value, str) and len(value) <= 32 else None
