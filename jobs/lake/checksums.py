"""A checksum of the windows of a slice, the same in whatever order and file they lie, and in every engine's hands."""

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from jobs.lake.columns import columns_of
from jobs.pipelines.pipeline import Pipeline

_EMPTY = "0" * 32


def checksum(pipeline: Pipeline, rows: pa.Table | ds.Dataset) -> str:
    """32 hex digits: the MD5 of each row, exclusive or."""
    columns = ", ".join(f"{_length_and(name)}" for name in columns_of(pipeline).names)
    with duckdb.connect() as database:
        database.execute("SET TimeZone = 'UTC'; SET threads = 1")
        database.register("windows", rows)
        found = database.execute(f"SELECT bit_xor(md5_number(concat({columns}))) FROM windows").fetchone()
    return f"{found[0]:032x}" if found and found[0] is not None else _EMPTY


def _length_and(name: str) -> str:
    """A value as text behind its length, so that no two rows read the same; NULL is none of the texts."""
    text = f'CAST("{name}" AS VARCHAR)'
    return f"coalesce(strlen({text}) || ':' || {text}, '-')"
