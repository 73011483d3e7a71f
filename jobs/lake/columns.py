"""The columns of live and final rows, from the definition of a pipeline, and the checksum over those columns.

The checksum of windows does not depend on their order, their files or the engine that wrote them.
"""

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable, Schema

from jobs.lake.delta.log import keep_entry
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.rules import digits_of
from jobs.refusal import Refusal
from jobs.storage.folders import Folder

TIME = pa.timestamp("us", tz="UTC")
_EMPTY = "0" * 32
_TYPES = {"BIGINT": pa.int64(), "STRING": pa.string(), "TIMESTAMP": TIME}


def columns_of(pipeline: Pipeline) -> pa.Schema:
    """Return the columns of window, keys and measures, as the definition gives them."""
    types = (arrow_type(type_) for type_ in pipeline.value_types)
    values = [pa.field(name, type_) for name, type_ in zip(pipeline.value_columns, types, strict=True)]
    return pa.schema([pa.field("window_start", TIME), pa.field("window_end", TIME), *values])


def arrow_type(sql: str) -> pa.DataType:
    """Return the Arrow type for a type in a definition, such as `BIGINT`."""
    if sql in _TYPES:
        return _TYPES[sql]
    return pa.decimal128(*digits_of(sql))


def schema_of(pipeline: Pipeline) -> pa.Schema:
    """Return the columns of a pipeline's final table."""
    return pa.schema(
        [
            *columns_of(pipeline),
            pa.field("version", pa.int64()),
            pa.field("as_of", TIME),
            pa.field("run", pa.string()),
            pa.field("fingerprint", pa.string()),
            # A header's row has the name of its slice here, and nulls in the columns of windows. A window's row has a
            # null here. So `final_slice IS NULL` selects the rows of windows.
            pa.field("final_slice", pa.string()),
            pa.field("header", pa.string()),
            pa.field("slice", pa.string()),
        ]
    )


def live_schema(pipeline: Pipeline) -> pa.Schema:
    """Return the columns of a pipeline's live table, as its stream writes them."""
    epoch, batch = pa.field("epoch", pa.int64()), pa.field("batch", pa.int64())
    more = [epoch, batch, pa.field("as_of", TIME), pa.field("fingerprint", pa.string())]
    of_batches = [pa.field("offsets", pa.string()), pa.field("watermark", TIME)]
    return pa.schema([*columns_of(pipeline), pa.field("slice", pa.string()), *more, *of_batches])


def adapt(table: DeltaTable, wanted: pa.Schema, path: Folder) -> None:
    """Add the columns that a table lacks. Refuse a column with a new type, since old rows could not be served."""
    there = {field.name: field for field in table.schema().fields}
    asked = Schema.from_arrow(wanted).fields
    changed = [field.name for field in asked if field.name in there and there[field.name].type != field.type]
    if changed:
        types = ", ".join(f"{name} is {there[name].type} there" for name in changed)
        raise Refusal(
            f"{path} holds rows of another type ({types}): take the change back, or give the measure another name"
        )
    if missing := [field for field in asked if field.name not in there]:
        table.alter.add_columns(missing)
        keep_entry(path, table.version())


def checksum(pipeline: Pipeline, rows: pa.Table | ds.Dataset) -> str:
    """Return 32 hex digits: the exclusive or of the MD5 of all rows."""
    columns = ", ".join(f"{_length_and(name)}" for name in columns_of(pipeline).names)
    with duckdb.connect() as database:
        database.execute("SET TimeZone = 'UTC'; SET threads = 1")
        database.register("windows", rows)
        found = database.execute(f"SELECT bit_xor(md5_number(concat({columns}))) FROM windows").fetchone()
    return f"{found[0]:032x}" if found and found[0] is not None else _EMPTY


def _length_and(name: str) -> str:
    """Return SQL for a value as text after its length. So different rows give different texts. NULL gives `-`.

    Example: a row of `a` and `bc` gives `1:a2:bc`, and a row of `ab` and `c` gives `2:ab1:c`.
    """
    text = f'CAST("{name}" AS VARCHAR)'
    return f"coalesce(strlen({text}) || ':' || {text}, '-')"
