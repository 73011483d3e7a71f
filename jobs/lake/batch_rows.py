"""The rows of a live table about its micro-batches, and the removal of old ones.

There is one row per batch, so there are many. Old rows are removed by whole files. Only the row of the first batch
stays for good, because it records where the stream began.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable

from jobs.pipelines.layout import BATCHES_SLICE
from jobs.storage.folders import Folder
from jobs.storage.parquet import read, write
from jobs.times import aware

_STATISTICS = ["path", "size_bytes", "num_records", "min.batch", "min.as_of", "max.as_of"]


@dataclass(frozen=True, kw_only=True)
class BatchFile:
    """A file with rows about batches, as the log describes it."""

    path: str
    size: int
    rows: int
    first_batch: int
    oldest: datetime
    newest: datetime


def files_about_batches(table: DeltaTable) -> list[BatchFile]:
    """Return the files with rows about batches, the oldest first. A file without statistics is skipped."""
    actions = pa.table(table.get_add_actions(flatten=True))
    if not {"partition.slice", *_STATISTICS} <= set(actions.column_names):
        return []
    about_batches = actions.filter(pc.equal(actions.column("partition.slice"), BATCHES_SLICE)).select(_STATISTICS)
    found = [
        BatchFile(
            path=action["path"],
            size=action["size_bytes"],
            rows=action["num_records"],
            first_batch=action["min.batch"],
            oldest=aware(action["min.as_of"]),
            newest=aware(action["max.as_of"]),
        )
        for action in about_batches.drop_null().to_pylist()
    ]
    return sorted(found, key=lambda file: file.newest)


def to_remove(files: Sequence[BatchFile], before: datetime) -> tuple[list[BatchFile], BatchFile | None]:
    """Return the files to remove, and the file among them with the first batch, if there is one.

    A file is old if all its batches were planned before ``before``. All old files are removed, except the newest of
    them. So the rows stay complete since a time before ``before`` (`complete_since`). A file with only the row of the
    first batch stays, too.

    In the example the files of three days are old. That of the third day stays, so the rows are complete since its
    noon. Without it they would be complete only since noon of the fourth day, which is after ``before``.

    >>> from datetime import UTC
    >>> def of_day(day):
    ...     noon = datetime(2026, 1, day, 12, tzinfo=UTC)
    ...     return BatchFile(path=f"{day}", size=1, rows=9, first_batch=9 * day, oldest=noon, newest=noon)
    >>> removed, with_first = to_remove([of_day(1), of_day(2), of_day(3), of_day(4)], datetime(2026, 1, 4, tzinfo=UTC))
    >>> [file.path for file in removed], with_first.path
    (['1', '2'], '1')
    """
    first = min(files, key=lambda file: file.first_batch, default=None)
    old = [file for file in files if file.newest < before][:-1]
    removed = [file for file in old if file != first or file.rows > 1]
    return removed, first if first in removed else None


def newest_watermark(table: Folder, files: Sequence[BatchFile]) -> datetime:
    """Return the watermark of the newest batches. Event times made it, so it is never ahead of the broker's clock.

    An event that is further ahead of its arrival than the watermark delay does not count. The watermark is read from a
    file: the log has the statistics of the first 32 columns only.
    """
    newest = max(files, key=lambda file: file.first_batch)
    return aware(pc.max(read(table / newest.path).column("watermark")).as_py())


def write_first_row(file: Folder, stage: Folder) -> Folder:
    """Stage a file with a single row: the row of the first batch in ``file``."""
    rows = read(file)
    first = rows.filter(pc.equal(rows.column("batch"), pc.min(rows.column("batch"))))
    staged = stage / f"slice={BATCHES_SLICE}" / "first.parquet"
    write(first, staged)
    return staged


def complete_since(rows: ds.Dataset) -> datetime | None:
    """Return the time from which on each batch has a row; None if there is no gap between the batches.

    In the example the rows of the batches 1 to 6 are missing, and batch 7 was planned on the 8th.

    >>> from datetime import UTC
    >>> def planned(*batches):
    ...     columns = {"batch": list(batches), "as_of": [datetime(2026, 1, batch + 1, tzinfo=UTC) for batch in batches]}
    ...     return ds.dataset(pa.table(columns))
    >>> complete_since(planned(0, 1, 2)) is None
    True
    >>> complete_since(planned(0, 7, 8)).day
    8
    """
    found = rows.to_table(["batch", "as_of"]).sort_by("batch")
    steps = pc.pairwise_diff(found.column("batch").combine_chunks())
    after_a_gap = pc.indices_nonzero(pc.fill_null(pc.greater(steps, 1), False))
    return aware(found.column("as_of")[after_a_gap[-1].as_py()].as_py()) if len(after_a_gap) else None
