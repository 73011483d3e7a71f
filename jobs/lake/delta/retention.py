"""Finds and deletes the files and empty folders of a table that no version within the table's retention needs.

The Delta library is only used to list the files. Its own deletion would also commit to the log, even after a successor
has taken over the table. The list has every file that no kept version names, also files that a crash left behind before
their commit.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from deltalake import DeltaTable

from jobs.lake.delta.log import entry_of
from jobs.storage.folders import Folder, delete_files, write_whole

# Longer lists are deleted in several turns, because a stream waits during a deletion.
MOST_FILES = 50_000
# While the clocks of files disagree, a file that is younger than this may wait for its commit.
_YOUNG_SECONDS = 3600.0
# A file in the table's folder about the last deletion. Readers skip names that begin with an underscore.
_LAST = "_freed.json"


@dataclass(frozen=True, kw_only=True)
class Freed:
    """The result of a deletion; ``left`` files wait for the next turn."""

    files: int = 0
    bytes: int = 0
    folders: int = 0
    left: int = 0


class _File(NamedTuple):
    name: str
    size: int
    modified: float


def unneeded(table: DeltaTable, path: Folder, partition: str) -> tuple[dict[Folder, int], list[Path]]:
    """Return the files that no version within the retention needs, with their sizes, and folders without other files.

    Only the folders of partitions are searched.

    A file that no version names may belong to another writer that is about to commit it. So only files that were placed
    before the newest commit are deleted. A writer that still wants to commit such a file has read an older version, so
    its commit fails.

    If the machine's clock was set back, a file that is placed now seems to be older than the newest commit, whose time
    lies in the future. Then files of the last hour stay, too.
    """
    unnamed = set(table.vacuum(dry_run=True, full=True))
    newest_commit, now = entry_of(path, table.version()).stat().st_mtime, time.time()
    before = newest_commit if newest_commit <= now else now - _YOUNG_SECONDS
    found, kept = dict[Folder, int](), dict[str, int]()
    for folder, count, files in _partitions(path, partition, unnamed):
        old = {path / folder / file.name: file.size for file in files if file.modified < before}
        found |= old
        kept[folder] = count - len(old)
    empty = [path / folder for folder, count in kept.items() if not count]
    return found, [folder for folder in empty if isinstance(folder, Path)]


def delete(files: Mapping[Folder, int], folders: Iterable[Path]) -> Freed:
    """Delete at most `MOST_FILES` of these files, and those of the folders that are empty then."""
    some = dict(list(files.items())[:MOST_FILES])
    delete_files(some)
    gone = 0
    for folder in folders:
        # The folder is not empty if a writer has put a file into it meanwhile, or if the next turn must empty it.
        with suppress(OSError):
            folder.rmdir()
            gone += 1
    return Freed(files=len(some), bytes=sum(some.values()), folders=gone, left=len(files) - len(some))


def is_due(path: Folder, every_seconds: float) -> bool:
    """Whether the last turn, by any process, was at least ``every_seconds`` ago."""
    try:
        last = float(json.loads((path / _LAST).read_text())["time"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return True
    # A time in the future came from a wrong clock.
    return not 0 <= time.time() - last < every_seconds


def took_turn(path: Folder, freed: Freed) -> None:
    """Record this turn. If files are left, record nothing: then the next turn is due at once."""
    if not freed.left:
        now = time.time()
        done = {"time": now, "at": f"{datetime.fromtimestamp(now, UTC):%FT%TZ}", **vars(freed)}
        write_whole(path / _LAST, json.dumps(done).encode())


def _partitions(path: Folder, partition: str, unnamed: Collection[str]) -> Iterator[tuple[str, int, list[_File]]]:
    """Yield each partition's folder with the number of its files, and those of them that no version names."""
    if isinstance(path, Path):
        for folder in os.scandir(path):
            if folder.name.startswith(f"{partition}=") and folder.is_dir():
                yield folder.name, *_files(folder, unnamed)
        return
    files = defaultdict[str, list[_File]](list)
    for file, seen in path.written().items():
        if file.parent.name.startswith(f"{partition}=") and file.parent.parent == path:
            files[file.parent.name].append(_File(file.name, seen.st_size, seen.st_mtime))
    for name, all_files in files.items():
        yield name, len(all_files), [file for file in all_files if f"{name}/{file.name}" in unnamed]


def _files(folder: os.DirEntry[str], unnamed: Collection[str]) -> tuple[int, list[_File]]:
    """Count the files of a folder, and look at those that no version names; most are named, and cost less this way."""
    count, found = 0, list[_File]()
    # The writer before this one may still delete here.
    with suppress(FileNotFoundError):
        for file in os.scandir(folder):
            with suppress(FileNotFoundError):
                if f"{folder.name}/{file.name}" in unnamed:
                    seen = file.stat()
                    found.append(_File(file.name, seen.st_size, seen.st_mtime))
                count += 1
    return count, found
