"""Delta tables with a fenced commit: files are staged first, then made visible by one entry in the log.

The commit is that of delta-rs, without retries: it succeeds only on the version that this writer has seen last. So a
process that was suspended while its successor wrote can no longer commit, even if it still considers its lease valid.
A table also merges its small files in this way, and deletes files that no reader needs.
"""

import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from jobs.lake.delta.log import commit_info, commit_infos, keep_entry, open_whole
from jobs.lake.delta.manifest import Manifest, TornStageError
from jobs.lake.delta.merging import bins
from jobs.lake.delta.reading import dataset, files_with_sizes, partition_folder
from jobs.lake.delta.retention import Freed, delete, is_due, took_turn, unneeded
from jobs.lake.delta.statistics import statistics_of
from jobs.pipelines.layout import STAGING
from jobs.refusal import Refusal
from jobs.storage.folders import Folder, for_each, last_written, make_durable, make_folder, place, remove
from jobs.storage.parquet import arrow_place, footer

log = logging.getLogger(__name__)

HOUR_SECONDS = 3600.0
# No commit takes as long as this, so an older stage was left by a writer that was killed.
STAGE_KEPT_SECONDS = 24 * HOUR_SECONDS
_STAGE = re.compile("[0-9a-f]{32}")
_PLACE_TRIES = 5

Action = AddAction | RemoveAction


class OvertakenError(Refusal):
    """Another writer has written to the table, so this one must end."""


class FencedTable:
    """A table with one partition column, open at a version. The next commit succeeds only if this is the newest one."""

    def __init__(self, path: Folder, table: DeltaTable) -> None:
        """Use a table that exists, at the version at which it was opened."""
        self.path = path
        self._table = table
        self._schema = table.schema()
        (self._partition,) = table.metadata().partition_columns

    @property
    def version(self) -> int:
        """The version that this writer has seen last."""
        return int(self._table.version())

    @property
    def staging(self) -> Folder:
        """The folder of files that wait for their commit. Readers and vacuum skip names that begin with `_`."""
        return self.path / STAGING

    def new_stage(self) -> Folder:
        """Return the path of a new folder for the files of one commit, to be written partitioned."""
        return self.staging / uuid.uuid4().hex

    @contextmanager
    def staged(self) -> Iterator[Folder]:
        """Yield the path of a new stage, and remove the stage at the end."""
        stage = self.new_stage()
        try:
            yield stage
        finally:
            remove(stage)

    def transact(
        self, actions: Sequence[Action], metadata: str, *transactions: Transaction, overwrites: bool = False
    ) -> None:
        """Commit the actions. With ``overwrites`` all other files leave the table, and its columns are set anew."""
        self._keep(actions)
        attempt = uuid.uuid4().hex
        signed = CommitProperties(
            custom_metadata={"userMetadata": metadata, "attempt": attempt},
            max_commit_retries=0,
            app_transactions=list(transactions) or None,
        )
        mode: Literal["append", "overwrite"] = "overwrite" if overwrites else "append"
        try:
            self._table.create_write_transaction(
                list(actions), mode, self._schema, [self._partition], commit_properties=signed
            )
        except (DeltaError, OSError) as error:
            if not self._is_there(attempt):
                if not isinstance(error, CommitFailedError):
                    raise
                raise OvertakenError(f"another writer has committed to {self.path}: this one ends") from error
            # For example, the disk had room for the commit, but not for the checkpoint of the log after it.
            log.warning("the commit to %s succeeded, but a step after it failed: %s", self.path, error)
        self._see_own_commit()

    def metadata(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number and the metadata of each commit, from this version back."""
        infos = commit_infos(self.path, self.version)
        return ((number, json.loads(info.get("userMetadata") or "{}")) for number, info in infos)

    def newest_metadata(self) -> dict[str, Any]:
        """Return the metadata of the newest commit; empty if the log has none."""
        return next((metadata for _, metadata in self.metadata()), {})

    def _is_there(self, attempt: str) -> bool:
        """Whether the next version is this commit.

        If a store's answer was lost, the client repeats its request. That fails, because the first one has succeeded.
        """
        return commit_info(self.path, self.version + 1).get("attempt") == attempt

    def _see_own_commit(self) -> None:
        before = self.version
        self._table.update_incremental()
        if self.version != before + 1:
            raise OvertakenError(
                f"{self.path} went from version {before} to {self.version} in one commit: another writer has committed"
            )
        keep_entry(self.path, self.version)

    def _keep(self, actions: Sequence[Action]) -> None:
        """Make files durable before a commit names them: a power cut must not leave a name without its rows."""
        added = [self.path / action.path for action in actions if isinstance(action, AddAction)]
        try:
            make_durable(*added, *dict.fromkeys(file.parent for file in added))
        except FileNotFoundError as error:
            raise OvertakenError(
                f"a file of this commit to {self.path} was deleted by another writer ({error.filename}): this one ends"
            ) from error

    def place(
        self, file: Folder, *, data_change: bool = True, keep: bool = False, known: pq.FileMetaData | None = None
    ) -> AddAction:
        """Place a staged file among the table's files. The file lies in a folder named after its partition.

        With ``keep`` the staged file stays, too, so that a run that repeats its commit finds it. ``known`` is the
        file's footer, if it was read before.
        """
        partition, value = file.parent.name.split("=", 1)
        folder = self.path / file.parent.name
        placed = folder / f"{uuid.uuid4().hex}.parquet"
        _put(file, placed, keep=keep)
        return AddAction(
            path=f"{folder.name}/{placed.name}",
            size=placed.stat().st_size,
            partition_values={partition: value},
            modification_time=int(time.time() * 1000),
            data_change=data_change,
            stats=json.dumps(statistics_of(known or footer(placed))),
        )

    def place_all(self, staged: Manifest, *, data_change: bool = True) -> list[AddAction]:
        """Place exactly the files of a manifest. Refuse if another process has removed one of them."""

        def placed(file: Folder) -> AddAction:
            return self.place(file, data_change=data_change, known=staged.files[file])

        try:
            return for_each(self.path, placed, list(staged.files))
        except FileNotFoundError as error:
            raise TornStageError(f"a staged file is gone ({error}): nothing is committed") from error

    def removal(self, file: str, size: int, *, data_change: bool = True) -> RemoveAction:
        """Return the action that takes a file out of the table. The file itself stays for readers of older versions."""
        partition, value = partition_folder(file).split("=", 1)
        return RemoveAction(file, data_change, int(time.time() * 1000), size, {partition: value})

    def merge_small_files(
        self, metadata: str, before_commit: Callable[[], None] = lambda: None, *, without: Collection[str] = ()
    ) -> None:
        """Merge small files in a fenced commit; files in ``without`` stay as they are.

        It is refused if the new files do not have as many rows as the files that they replace.

        The Delta library's own merge is not fenced: if two writers merge the same files, it keeps both results, and
        every row is there twice.
        """
        began, actions = time.monotonic(), list[Action]()
        small = {file: size for file, size in files_with_sizes(self._table).items() if file not in without}
        with self.staged() as stage:
            for number, files in enumerate(bins(small)):
                folder = stage / str(number) / partition_folder(next(iter(files)))
                rows = dataset(self._table, self.path, files)
                columns = [name for name in rows.schema.names if name != self._partition]
                into, by = arrow_place(folder)
                ds.write_dataset(
                    rows.scanner(columns=columns),
                    into,
                    filesystem=by,
                    format="parquet",
                    min_rows_per_group=100_000,
                    # In a bucket Arrow would write a marker for every folder above, also where it may not write.
                    create_dir=isinstance(folder, Path),
                )
                # A successor may have removed the stage meanwhile. Then the merged files must not leave the table.
                actions += self.place_all(Manifest.of(folder, rows.count_rows()), data_change=False)
                actions += [self.removal(file, size, data_change=False) for file, size in files.items()]
        before_commit()
        if actions:
            self.transact(actions, metadata)
        removed = sum(isinstance(action, RemoveAction) for action in actions)
        seconds = time.monotonic() - began
        log.info("merged %d files of %s into %d in %.1f s", removed, self.path.name, len(actions) - removed, seconds)

    def delete_now_and_then(self, every_seconds: float = HOUR_SECONDS) -> Freed | None:
        """Delete unneeded files if the last deletion was ``every_seconds`` ago: a deletion lists the whole folder."""
        return self.delete_what_no_reader_needs() if is_due(self.path, every_seconds) else None

    def delete_what_no_reader_needs(self) -> Freed:
        """Delete all files, and empty folders, that no version within the table's retention needs."""
        began = time.monotonic()
        files, folders = unneeded(self._table, self.path, self._partition)
        # The table is opened once more to see its newest version. `self._table` keeps its version, because that fences
        # the next commit.
        if DeltaTable(str(self.path)).version() != self.version:
            raise OvertakenError(f"another writer has committed to {self.path}: this one deletes nothing")
        freed = delete(files, folders)
        self._remove_dead_stages()
        took_turn(self.path, freed)
        seconds, left = time.monotonic() - began, f"; {freed.left} files wait for the next turn" if freed.left else ""
        log.info(
            "freed %d bytes of %s: %d files, %d empty folders, in %.1f s%s",
            *(freed.bytes, self.path.name, freed.files, freed.folders, seconds, left),
        )
        return freed

    def _remove_dead_stages(self) -> None:
        """Remove old stages of killed writers. The stages of streams and runs have other names, and stay."""
        folders = self.staging.iterdir() if self.staging.is_dir() else ()
        before = time.time() - STAGE_KEPT_SECONDS
        for folder in [each for each in folders if _STAGE.fullmatch(each.name)]:
            # Another process may delete here, too, or remove its own stage.
            with suppress(FileNotFoundError):
                if 0 < last_written(folder) < before:
                    log.info("removed %s, the stage of a writer that has died", folder)
                    remove(folder)


def _put(file: Folder, placed: Folder, *, keep: bool) -> None:
    """Place a file. A deletion may remove the folder while it is empty, so the folder is made again."""
    for tries_left in reversed(range(_PLACE_TRIES)):
        try:
            make_folder(placed.parent)
            return place(file, placed, keep=keep)
        except (FileNotFoundError, FileExistsError):
            if not tries_left or not file.exists():
                raise


def opened(path: Folder, schema: pa.Schema, partition: str, properties: Mapping[str, str]) -> DeltaTable:
    """Open a table to write; create it if it is missing."""
    try:
        # First without `DeltaTable.create`, which reads the log of an existing table twice.
        return open_whole(path)
    except TableNotFoundError:
        make_folder(path / "_delta_log")
        with suppress(CommitFailedError):
            DeltaTable.create(
                str(path), schema=schema, partition_by=[partition], mode="ignore", configuration=dict(properties)
            )
        # Another process may have created it meanwhile, or it was created and the answer was lost.
        table = DeltaTable(str(path))
        keep_entry(path, table.version())
        return table


def kept_for(interval: str) -> dict[str, str]:
    """Return the properties of a table that keeps its log and its replaced files for a time, such as `6 hours`."""
    names = ("delta.logRetentionDuration", "delta.deletedFileRetentionDuration")
    return dict.fromkeys(names, f"interval {interval}")


def set_properties(table: DeltaTable, path: Folder, properties: Mapping[str, str]) -> None:
    """Give a table these properties, by a commit that fails if another writer has committed meanwhile.

    The commit repeats the metadata of the newest earlier commit, because readers need it. If the properties shorten the
    time for which the log is kept, the earlier commit may be deleted at once.
    """
    there = table.metadata().configuration
    changed = {name: value for name, value in properties.items() if there.get(name) != value}
    if not changed:
        return
    try:
        table.alter.set_table_properties(changed, commit_properties=_repeating_metadata(table, path))
    except CommitFailedError as error:
        raise OvertakenError(f"another writer has committed to {path}: this one ends") from error
    keep_entry(path, table.version())
    log.info("%s has new properties: %s", path.name, changed)


def _repeating_metadata(table: DeltaTable, path: Folder) -> CommitProperties:
    infos = commit_infos(path, table.version())
    newest = next((info["userMetadata"] for _, info in infos if "userMetadata" in info), None)
    return CommitProperties(max_commit_retries=0, custom_metadata={"userMetadata": newest} if newest else None)
