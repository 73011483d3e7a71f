"""Where everything lies: folders of the lake, partitions of tables, DAGs. Each name is spelled here only."""

HOUR_MS = 3_600_000
# Where a live table keeps its rows about micro-batches, beside the slices of windows.
BATCHES_SLICE = "batches"
# Where a final table keeps the headers of a day's slices: this, and the day.
HEADERS_SLICE = "headers-"
# Where it keeps rows of many slices of a day in one file: this, the day, and a sign of their columns.
ROWS_SLICE = "rows-"
# Incidents of all jobs; no job's name begins so.
INCIDENTS = "control/_incidents"
# Where a reset puts the old checkpoint.
ASIDE = "checkpoints/_aside"


def checkpoint_of(job: str, source: str | None = None) -> str:
    """The checkpoint folder of a streaming job below the lake's root; `ingest` has one per source."""
    return f"checkpoints/{job}/{source}" if source else f"checkpoints/{job}"


def control_of(job: str) -> str:
    """The control folder of a streaming job, below the lake's root."""
    return f"control/{job}"


def dag_id_of(job: str) -> str:
    """The DAG that runs a streaming job."""
    return f"stream_{job}"
