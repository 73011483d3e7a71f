"""A table at one version, its files as the log lists them, and a dataset of some of them."""

from collections import Counter
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from pyarrow.fs import SubTreeFileSystem

from jobs.storage.folders import Folder
from jobs.storage.parquet import arrow_place


def table_at(path: Folder, version: int | None = None) -> DeltaTable | None:
    """Open a table to read, at its newest version or at an older one; return None if it was never created."""
    try:
        return DeltaTable(str(path), version=version)
    except TableNotFoundError:
        return None


def files_of(table: DeltaTable, path: Folder, schema: pa.Schema | None = None) -> ds.Dataset:
    """Return a table's rows as a dataset of its files and partitions, without the log's statistics.

    With those statistics rows could be missing: the Delta library replaces a missing bound by an impossible one.
    The parquet files have statistics of their own. With a ``schema`` the columns that the table lacks are null.
    """
    return dataset(table, path, files_with_sizes(table), schema)


def files_with_sizes(table: DeltaTable) -> dict[str, int]:
    """Return the table's files with their sizes. Paths are relative to its folder."""
    actions = pa.table(table.get_add_actions(flatten=True))
    if not actions.num_rows:
        return {}
    return dict(zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True))


def rows_by_partition(table: DeltaTable) -> Counter[str]:
    """Count the rows per value of the partition column."""
    actions = pa.table(table.get_add_actions(flatten=True))
    rows = Counter[str]()
    if actions.num_rows:
        for path, count in zip(actions["path"].to_pylist(), actions["num_records"].to_pylist(), strict=True):
            rows[value_of(path)] += count
    return rows


def value_of(file: str) -> str:
    """Return the value of the partition column from the name of a file's folder."""
    return partition_folder(file).partition("=")[2]


def partition_folder(file: str) -> str:
    """Return the name of a file's folder, which is that of its partition: `day=1` of `day=1/part-0.parquet`."""
    # Not by Path: for thousands of files that would take longer than all other steps.
    return file.rpartition("/")[0].rpartition("/")[2]


def dataset(table: DeltaTable, path: Folder, files: Iterable[str], schema: pa.Schema | None = None) -> ds.Dataset:
    """Return some files of a table as a dataset."""
    folder, parquet = SubTreeFileSystem(*arrow_place(path)), ds.ParquetFileFormat()
    partitions = {file: partition_folder(file).split("=", 1) for file in files}
    fragments = [parquet.make_fragment(file, folder, ds.field(p) == value) for file, (p, value) in partitions.items()]
    # Columns that the schema calls non-null are null in rows about micro-batches, which have no window.
    columns = schema or pa.schema(table.schema().to_arrow())
    nullable = pa.schema([field.with_nullable(True) for field in columns])
    return ds.FileSystemDataset(fragments, nullable, parquet, folder)
