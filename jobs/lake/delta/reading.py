"""The files of a table as its log lists them, and a dataset of some of them."""

from collections import Counter
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from pyarrow.fs import SubTreeFileSystem

from jobs.storage.folders import Folder
from jobs.storage.parquet import arrow_place


def files_of(table: DeltaTable, path: Folder, schema: pa.Schema | None = None) -> ds.Dataset:
    """What is in a table now, to be read: its files and their partitions, but not the log's statistics of them.

    With a schema: as if it had these columns; those that it has not yet are null. The Delta library makes of a bound
    that is not there one that no value meets: rows would be missing. Parquet has statistics of its own.
    """
    return dataset(table, path, files_with_sizes(table), schema)


def files_with_sizes(table: DeltaTable) -> dict[str, int]:
    """The files that a table consists of, relative to its folder."""
    actions = pa.table(table.get_add_actions(flatten=True))
    if not actions.num_rows:
        return {}
    return dict(zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True))


def rows_by_partition(table: DeltaTable) -> Counter[str]:
    """How many rows there are, by the value of the partition column."""
    actions = pa.table(table.get_add_actions(flatten=True))
    rows = Counter[str]()
    if actions.num_rows:
        for path, count in zip(actions["path"].to_pylist(), actions["num_records"].to_pylist(), strict=True):
            rows[value_of(path)] += count
    return rows


def value_of(file: str) -> str:
    """The value of the partition column that a file's folder names."""
    return _folder(file).partition("=")[2]


def _folder(file: str) -> str:
    # Not by Path: of thousands of files that would take longer than all the rest.
    return file.rpartition("/")[0].rpartition("/")[2]


def dataset(table: DeltaTable, path: Folder, files: Iterable[str], schema: pa.Schema | None = None) -> ds.Dataset:
    """Some files of a table, to be read."""
    folder, parquet = SubTreeFileSystem(*arrow_place(path)), ds.ParquetFileFormat()
    partitions = {file: _folder(file).split("=", 1) for file in files}
    fragments = [parquet.make_fragment(file, folder, ds.field(p) == value) for file, (p, value) in partitions.items()]
    # Rows about batches have no window: what a plan calls never null is so only in its own rows.
    columns = schema or pa.schema(table.schema().to_arrow())
    nullable = pa.schema([field.with_nullable(True) for field in columns])
    return ds.FileSystemDataset(fragments, nullable, parquet, folder)
