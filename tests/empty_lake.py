"""A lake with every table and no row, made without Spark: queries have their columns there."""

from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable

from jobs.lake.columns import TIME, arrow_type
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines import PIPELINES, SOURCES
from jobs.pipelines.source import Source
from jobs.query.lake import Lake


def empty_lake(root: Path) -> Lake:
    """Create the tables of all jobs below a folder. Live tables stay away, as where no stream has ever run."""
    for source in SOURCES.values():
        DeltaTable.create(str(root / source.events_table), schema=_events(source), partition_by=["hour"])
    for pipeline in PIPELINES.values():
        for name, opened in vars(PipelineLake).items():
            if name.startswith("open_"):
                opened(PipelineLake(root, pipeline))
    return Lake(root)


def _events(source: Source) -> pa.Schema:
    """The columns of landed records. `tests/test_docs.py` makes the same table from the frame that `ingest` writes."""
    own = [(field.name, arrow_type(field.type)) for field in source.columns]
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    return pa.schema(
        [
            *(("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())),
            *(("arrival_time", TIME), ("event_time", TIME), *own),
            *(("reason", pa.string()), ("raw", pa.binary()), ("raw_key", pa.binary()), ("raw_headers", headers)),
            ("hour", pa.string()),
        ]
    )
