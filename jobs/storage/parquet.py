"""Parquet files of the lake, read and written by Arrow wherever they lie."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem, LocalFileSystem

from jobs.storage.folders import Folder


def arrow_place(folder: Folder) -> tuple[str, FileSystem]:
    """A folder or a file as Arrow wants it named, and what it reaches it by."""
    if isinstance(folder, Path):
        # Arrow's own file system: the one of the Delta library ends a process noisily.
        return str(folder), LocalFileSystem()
    from jobs.storage.bucket import arrow_files

    return f"{folder.bucket}/{folder.key}", arrow_files()


def files_in(folder: Folder) -> list[Folder]:
    """The files in a folder and below it, in order."""
    return sorted(folder.rglob("*.parquet"), key=str)


def write(table: pa.Table, file: Folder) -> None:
    """Write a file, and the folder that it lies in."""
    file.parent.mkdir(parents=True, exist_ok=True)
    name, files = arrow_place(file)
    pq.write_table(table, name, filesystem=files)


def read(file: Folder, columns: Sequence[str] | None = None) -> pa.Table:
    """What is in a file; the folders that it lies in add nothing to it."""
    name, files = arrow_place(file)
    return pq.read_table(name, columns=None if columns is None else list(columns), filesystem=files, partitioning=None)


def footer(file: Folder) -> pq.FileMetaData:
    """What a file says of itself."""
    name, files = arrow_place(file)
    return pq.read_metadata(name, filesystem=files)
