"""Names that several modules need: of the lake's folders, of the tables' partitions, and of the DAGs of streaming jobs.

The paths of tables, and the names of a pipeline's other jobs, are properties of `Source` and `Pipeline`.
"""

HOUR_MS = 3_600_000
# Events lie in a partition for each hour. Its name, as Python and as Spark writes it.
HOUR_FORMAT = "%Y-%m-%dT%H"
SPARK_HOUR_FORMAT = "yyyy-MM-dd'T'HH"
# Where a live table keeps its rows about micro-batches, beside the slices of windows.
BATCHES_SLICE = "batches"
# Where a final table keeps the headers of a day's slices: this prefix and the day.
HEADERS_SLICE = "headers-"
# Where a final table keeps the folded rows of many slices of a day: this prefix, the day, and a digest of the columns.
ROWS_SLICE = "rows-"
# Below a table: files that a writer has written and not committed. Below a final table: the folders of runs, too.
STAGING = "_staging"
# Spark's checkpoints: a folder for each streaming job.
CHECKPOINTS = "checkpoints"
# The pages about audits and checks: a folder for each pipeline and for each check job.
PAGES = "quality"
# Beside the control folders of the jobs lie the incidents of all jobs, and a file that reserves some bytes of the disk.
# Their names begin with an underscore, and no job's name does.
_CONTROL = "control"
INCIDENTS = f"{_CONTROL}/_incidents"
SPARE = f"{_CONTROL}/_spare"
# What is put aside lies in a folder of this name. Upkeep removes it after a while.
PUT_ASIDE = "_aside"
# The folder to which a reset moves the old checkpoint.
ASIDE = f"{CHECKPOINTS}/{PUT_ASIDE}"


def checkpoint_of(job: str, source: str | None = None) -> str:
    """The checkpoint folder of a streaming job below the lake's root; `ingest` has one per source."""
    return f"{CHECKPOINTS}/{job}/{source}" if source else f"{CHECKPOINTS}/{job}"


def control_of(job: str) -> str:
    """The control folder of a streaming job, or of a pipeline's recompute or account, below the lake's root."""
    return f"{_CONTROL}/{job}"


def recompute_job_of(pipeline: str) -> str:
    """The DAG that makes a pipeline's slices final. Its lease has the same name."""
    return f"recompute_{pipeline}"


def dag_id_of(job: str) -> str:
    """The DAG that runs a streaming job."""
    return f"stream_{job}"
