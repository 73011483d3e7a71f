"""Parquet files of the lake, which Arrow reads and writes on a disk and in a bucket; and where Arrow finds a folder."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem, LocalFileSystem

from jobs.storage.folders import Folder


def arrow_place(folder: Folder) -> tuple[str, FileSystem]:
    """Return the path of a folder or file for Arrow, and Arrow's file system for it."""
    if isinstance(folder, Path):
        # This is Arrow's own file system. With that of the Delta library, a process prints messages when it ends.
        return str(folder), LocalFileSystem()
    from jobs.storage.bucket import arrow_files

    return f"{folder.bucket}/{folder.key}", arrow_files()


def files_in(folder: Folder) -> list[Folder]:
    """The parquet files in a folder and below it, in the order of their paths."""
    return sorted(folder.rglob("*.parquet"), key=str)


def write(table: pa.Table, file: Folder) -> None:
    """Write a file, and make its folder if it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    name, files = arrow_place(file)
    pq.write_table(table, name, filesystem=files)


def read(file: Folder, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of a file. Names of folders such as `day=1` add no columns."""
    name, files = arrow_place(file)
    return pq.read_table(name, columns=None if columns is None else list(columns), filesystem=files, partitioning=None)


def footer(file: Folder) -> pq.FileMetaData:
    """Return the metadata in a file's footer, such as its number of rows."""
    name, files = arrow_place(file)
    return pq.read_metadata(name, filesystem=files)
