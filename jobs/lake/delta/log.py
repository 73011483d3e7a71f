"""The log of a Delta table: the metadata of its commits, and the repair of a log after a power cut."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from jobs.pipelines.layout import PUT_ASIDE
from jobs.storage.folders import Folder, make_durable, put_aside

log = logging.getLogger(__name__)

# The temporary names of the Delta library in a table's log, on a disk. A killed process leaves such a file.
HALF_WRITTEN = re.compile(r"_commit_[0-9a-f-]+\.json\.tmp|(\d{20}\.(json|checkpoint\.parquet)|_last_checkpoint)#\d+")


def open_whole(path: Folder) -> DeltaTable:
    """Open a table, and put aside files of its log that a power cut has torn: the newest commit or a checkpoint.

    The writer of a torn commit had not yet reported it as done. In a bucket every file is whole.
    """
    try:
        table = DeltaTable(str(path))
    except DeltaError:
        torn = _torn_files(path)
        if not torn:
            raise
    else:
        newest = entry_of(path, table.version())
        # The library ignores an empty entry, and a torn entry if there is a checkpoint of that version.
        if not (isinstance(newest, Path) and newest.is_file() and _is_torn(newest)):
            return table
        torn = _torn_files(path)
    # Another power cut may come in between. So what refers to a file goes before the file: first the hint, then the
    # checkpoint, then the commit.
    for file in reversed(torn):
        aside = put_aside(file, Path(str(path)) / PUT_ASIDE, file.name)
        log.warning("%s is incomplete, as after a power cut: it was moved to %s", file, aside)
    return DeltaTable(str(path))


def is_whole(path: Folder) -> bool:
    """Whether the log has no torn files, which its writer would have to put aside."""
    return not _torn_files(path)


def _torn_files(path: Folder) -> list[Path]:
    """The files of the log that must be put aside after a power cut. Earlier commits are durable, so they are whole.

    These are the newest entry, if it is torn, and the newest checkpoint, if it is torn or is the checkpoint of a torn
    entry. `_last_checkpoint` is put aside together with the checkpoint.
    """
    if not isinstance(path, Path):
        return []
    log_folder = path / "_delta_log"
    entry = max(log_folder.glob("*.json"), default=None)
    torn = [entry] if entry and _is_torn(entry) else []
    checkpoint = max(log_folder.glob("*.checkpoint*.parquet"), default=None)
    of_torn_entry = torn and checkpoint and checkpoint.name.startswith(torn[0].stem)
    if checkpoint and (of_torn_entry or _is_torn(checkpoint)):
        # The library relies on `_last_checkpoint`, which would then name a missing checkpoint.
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
    """Make a commit durable, together with the log's checkpoint that the library may have written with it."""
    entry = entry_of(path, version)
    checkpoint = entry.parent / f"{version:020}.checkpoint.parquet"
    # A bucket needs no such step, and each look at a file is a request.
    made = [checkpoint] if isinstance(checkpoint, Path) and checkpoint.is_file() else []
    # The content of the checkpoint comes first. The fsync of the entry may also make earlier renames durable, such as
    # that of the checkpoint. If its content were not durable yet, a power cut could leave a torn checkpoint.
    make_durable(*made, entry, entry.parent)


def entry_of(path: Folder, version: int) -> Folder:
    """The file of the log that holds a commit."""
    return path / "_delta_log" / f"{version:020}.json"


def commit_infos(path: Folder, version: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the metadata of each commit, from a version back, as far as the log goes.

    This reads the log's files, because `DeltaTable.history` is wrong if the table was opened at an older version: it
    begins with the newest commit of all, and gives it the number of the older version.
    """
    for number in range(version, -1, -1):
        try:
            yield number, _said_in(entry_of(path, number).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return


def commit_info(path: Folder, version: int) -> dict[str, Any]:
    """Return the metadata of one commit; empty if the log does not have it."""
    return next((info for _, info in commit_infos(path, version)), {})


def _said_in(entry: str) -> dict[str, Any]:
    infos = (json.loads(line)["commitInfo"] for line in entry.splitlines() if line.startswith('{"commitInfo"'))
    return dict(next(infos, {}))
