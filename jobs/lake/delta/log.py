"""The log of a Delta table on its disk: what commits say of themselves, and what a power cut has done to it."""

import json
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from jobs.storage.folders import Folder, make_durable, make_folder

log = logging.getLogger(__name__)


def open_whole(path: Folder) -> DeltaTable:
    """A table without what a power cut has torn: the newest commit, of which nobody was told, or a checkpoint.

    Only on a disk: what is in a bucket is whole.
    """
    try:
        table = DeltaTable(str(path))
    except DeltaError:
        torn = _torn_files(path)
        if not torn:
            raise
    else:
        newest = entry_of(path, table.version())
        # The library passes over an empty entry, and over a torn one if it has a checkpoint of that version.
        if not (isinstance(newest, Path) and newest.is_file() and _is_torn(newest)):
            return table
        torn = _torn_files(path)
    for file in torn:
        aside = Path(str(path)) / "_aside" / f"{file.name}-{uuid.uuid4().hex}"
        log.warning("%s was torn, as by a power cut: it is put aside as %s", file, aside)
        make_folder(aside.parent)
        file.rename(aside)
        make_durable(file.parent)
    return DeltaTable(str(path))


def is_whole(path: Folder) -> bool:
    """Whether a power cut has torn nothing of the log that its writer would put aside."""
    return not _torn_files(path)


def _torn_files(path: Folder) -> list[Path]:
    """The newest entry of a log if it is torn, a checkpoint that is torn or of that entry, and what names a checkpoint.

    Commits before are durable.
    """
    if not isinstance(path, Path):
        return []
    log_folder = path / "_delta_log"
    entry = max(log_folder.glob("*.json"), default=None)
    torn = [entry] if entry and _is_torn(entry) else []
    checkpoint = max(log_folder.glob("*.checkpoint*.parquet"), default=None)
    of_torn_entry = torn and checkpoint and checkpoint.name.startswith(torn[0].stem)
    if checkpoint and (of_torn_entry or _is_torn(checkpoint)):
        # The library relies on the hint, which would name a checkpoint that is not there.
        torn += [checkpoint, *log_folder.glob("_last_checkpoint")]
    return torn


def _is_torn(file: Path) -> bool:
    try:
        if file.suffix == ".json":
            return not [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        pq.read_metadata(file)
    except (ValueError, pa.ArrowException):
        return True
    return False


def keep_entry(path: Folder, version: int) -> None:
    """Make a commit durable, and the checkpoint of the log that the library may have written with it."""
    entry = entry_of(path, version)
    checkpoint = entry.parent / f"{version:020}.checkpoint.parquet"
    # A bucket has no need of it, and each question is a request.
    made = [checkpoint] if isinstance(checkpoint, Path) and checkpoint.is_file() else []
    # The entry last: with it the disk may write down all that was renamed before.
    make_durable(*made, entry, entry.parent)


def entry_of(path: Folder, version: int) -> Folder:
    """The file of the log that holds a commit."""
    return path / "_delta_log" / f"{version:020}.json"


def said(path: Folder, version: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """What the commits of a table say of themselves, from a version back, as far as its log goes.

    By the log's own files: `DeltaTable.history` begins with the newest commit there is, and numbers it as if it were
    the version at which the table was opened.
    """
    for number in range(version, -1, -1):
        try:
            yield number, _said_in(entry_of(path, number).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return


def said_at(path: Folder, version: int) -> dict[str, Any]:
    """What one commit says of itself; nothing if the log does not have it."""
    return next((words for _, words in said(path, version)), {})


def _said_in(entry: str) -> dict[str, Any]:
    infos = (json.loads(line)["commitInfo"] for line in entry.splitlines() if line.startswith('{"commitInfo"'))
    return dict(next(infos, {}))
