"""The checksum of a slice's windows. It does not depend on their order, their files or the engine that wrote them."""

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from jobs.lake.columns import columns_of
from jobs.pipelines.pipeline import Pipeline

_EMPTY = "0" * 32


def checksum(pipeline: Pipeline, rows: pa.Table | ds.Dataset) -> str:
    """Return 32 hex digits: the exclusive or of the MD5 of all rows."""
    columns = ", ".join(f"{_length_and(name)}" for name in columns_of(pipeline).names)
    with duckdb.connect() as database:
        database.execute("SET TimeZone = 'UTC'; SET threads = 1")
        database.register("windows", rows)
        found = database.execute(f"SELECT bit_xor(md5_number(concat({columns}))) FROM windows").fetchone()
    return f"{found[0]:032x}" if found and found[0] is not None else _EMPTY


def _length_and(name: str) -> str:
    """Return SQL for a value as text after its length, so that no two rows give the same text; NULL gives `-`."""
    text = f'CAST("{name}" AS VARCHAR)'
    return f"coalesce(strlen({text}) || ':' || {text}, '-')"
