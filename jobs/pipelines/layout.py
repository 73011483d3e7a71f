"""The names of the lake's folders, of the tables' partitions and of DAGs. Each name is spelled only here."""

HOUR_MS = 3_600_000
# Where a live table keeps its rows about micro-batches, beside the slices of windows.
BATCHES_SLICE = "batches"
# Where a final table keeps the headers of a day's slices: this prefix and the day.
HEADERS_SLICE = "headers-"
# Where it keeps the folded rows of many slices of a day: this prefix, the day, and a digest of their columns.
ROWS_SLICE = "rows-"
# Below a table: files that a writer has written and not committed. Below a final table: the folders of runs, too.
STAGING = "_staging"
# Incidents of all jobs. No job's name begins with an underscore, so no job has this folder.
INCIDENTS = "control/_incidents"
# What is put aside lies in a folder of this name. Upkeep removes it after a while.
PUT_ASIDE = "_aside"
# The folder to which a reset moves the old checkpoint.
ASIDE = f"checkpoints/{PUT_ASIDE}"


def checkpoint_of(job: str, source: str | None = None) -> str:
    """The checkpoint folder of a streaming job below the lake's root; `ingest` has one per source."""
    return f"checkpoints/{job}/{source}" if source else f"checkpoints/{job}"


def control_of(job: str) -> str:
    """The control folder of a streaming job, below the lake's root."""
    return f"control/{job}"


def dag_id_of(job: str) -> str:
    """The DAG that runs a streaming job."""
    return f"stream_{job}"
