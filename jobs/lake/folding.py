"""Folds final rows: puts the rows of many slices of a day into one file. A year of slices is then a few thousand files.

Headers are not touched. The statistics in the table's log are enough to decide which files are due.
"""

import hashlib
import json
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby, islice, takewhile
from operator import attrgetter, or_
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import DeltaTable

from jobs.lake.delta.merging import GOOD_FILE_BYTES, File, similar
from jobs.lake.delta.reading import value_of
from jobs.pipelines.days import DAY_MS, settled_before_ms
from jobs.pipelines.layout import HEADERS_SLICE, HOUR_MS, ROWS_SLICE
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import Slice, adjacent_groups, day_of_slice, slice_named, start_ms_of
from jobs.storage.folders import Folder, for_each, write_whole
from jobs.storage.parquet import arrow_place

_TIME = pa.timestamp("us", tz="UTC")
# The columns of a final row beside its window and the pipeline's own columns. `jobs.finality.recompute` adds them.
_STAMP = ("version", "as_of", "run", "fingerprint")
# If a slice is published again, this is mostly within minutes. So the slices of an hour rest this long before a fold.
HOUR_REST_MS = 2 * HOUR_MS
# The limits of the files that are folded into one.
_MOST_BYTES = 128 * 1024 * 1024
_MOST_FILES = 1500
# In the table's folder: the first file of each failed fold, and when it failed. A retry reads most of a day's files
# again, so it has to wait.
_FAILED = "_not_folded.json"
_TRY_AGAIN_SECONDS = 24 * HOUR_MS // 1000
# With groups of this many rows, a reader of one slice reads only one or two groups.
_GROUP_ROWS = 32_768


class Stored(NamedTuple):
    """A file of final rows, as the log describes it.

    ``first`` and ``last`` are the begins of its first and last window, in microseconds since 1970; None if unknown.
    """

    path: str
    size: int
    rows: int | None
    first: int | None
    last: int | None

    def may_touch(self, slice_: Slice) -> bool:
        """Whether the file may have windows of a slice.

        >>> file = Stored("file", size=1, rows=2, first=59_000_000, last=60_000_000)
        >>> [file.may_touch(Slice(start, start + 60_000)) for start in (0, 60_000, 120_000)]
        [True, True, False]
        """
        if self.first is None or self.last is None:
            return True
        return self.first < slice_.end_ms * 1000 and self.last >= slice_.start_ms * 1000

    def lies_in(self, slice_: Slice) -> bool:
        """Whether all windows of the file are known to begin in a slice.

        >>> Stored("file", size=1, rows=2, first=59_000_000, last=60_000_000).lies_in(Slice(0, 60_000))
        False
        >>> Stored("file", size=1, rows=2, first=None, last=None).lies_in(Slice(0, 60_000))
        False
        """
        if self.first is None or self.last is None:
            return self.rows == 0
        return slice_.start_ms * 1000 <= self.first and self.last < slice_.end_ms * 1000


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Files of a day to be folded into one, in the order of their windows."""

    day: str
    files: tuple[Stored, ...]

    @property
    def rows(self) -> int:
        """The number of rows by the log."""
        return sum(file.rows or 0 for file in self.files)


def stored(table: DeltaTable) -> list[Stored]:
    """Return the files of final rows, in order."""
    actions = pa.table(table.get_add_actions(flatten=True))
    if not actions.num_rows:
        return []
    first, last = (pc.cast(actions[f"{bound}.window_start"], _TIME).cast(pa.int64()) for bound in ("min", "max"))
    # A null window_start lies in no slice, so the bounds of such a file count as unknown.
    known = pc.equal(actions["null_count.window_start"], 0)
    columns = [actions["path"], actions["size_bytes"], actions["num_records"]]
    columns += [pc.if_else(known, bound, None) for bound in (first, last)]
    files = (Stored(*values) for values in zip(*(column.to_pylist() for column in columns), strict=True))
    return sorted(file for file in files if not value_of(file.path).startswith(HEADERS_SLICE))


def of_day(files: Sequence[Stored], day: str) -> list[Stored]:
    """Return the folded files of a day; ``files`` must be in order."""
    folder = f"slice={ROWS_SLICE}{day}"
    first = bisect_left(files, folder, key=attrgetter("path"))
    return list(takewhile(lambda file: file.path.startswith(folder), islice(files, first, None)))


def by_day(slices: Iterable[Slice]) -> Mapping[str, list[Slice]]:
    """Group slices by the day on which they begin.

    >>> dict(by_day([Slice(86_399_000, 86_401_000)]))
    {'19700101': [Slice(start_ms=86399000, end_ms=86401000)]}
    """
    found = defaultdict[str, list[Slice]](list)
    for slice_ in slices:
        found[day_of_slice(slice_.name)].append(slice_)
    return found


def folder_of(day: str, names: Sequence[str]) -> str:
    """Return the folder for a day's folded rows with these columns. Rows with other columns get another folder."""
    digest = hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:8]
    return f"slice={ROWS_SLICE}{day}-{digest}"


def within(slices: Iterable[Slice]) -> ds.Expression:
    """Return the filter for windows that belong to these slices."""
    runs = [(run[0].start, run[-1].end) for run in adjacent_groups(slices)]
    start = ds.field("window_start")
    return reduce(or_, ((start >= pa.scalar(a, _TIME)) & (start < pa.scalar(b, _TIME)) for a, b in runs))


# -- Due folds --


def due(files: Iterable[Stored], pipeline: Pipeline, now_ms: int) -> Iterator[Fold]:
    """Yield the folds that are due, the newest days first. No file is in two folds; ``files`` must be in order."""
    days = defaultdict[str, list[Stored]](list)
    for file in files:
        days[value_of(file.path).removeprefix(ROWS_SLICE)[:8]].append(file)
    for day in sorted(days, reverse=True):
        slices, folded = _slices(days[day], pipeline), of_day(days[day], day)
        end_ms = max([start_ms_of(f"{day}T000000Z") + DAY_MS, *(slice_.end_ms for slice_ in slices)])
        if end_ms <= settled_before_ms(pipeline, now_ms):
            yield from _whole_day(day, list(slices.values()), folded)
        else:
            yield from _hours(day, slices, now_ms)


def _slices(files: Iterable[Stored], pipeline: Pipeline) -> dict[Slice, list[Stored]]:
    """The slices with own files that can be folded: small files, with no window of another slice."""
    by_name = groupby(files, key=lambda file: value_of(file.path))
    slices = {slice_named(pipeline, name): list(own) for name, own in by_name if not name.startswith(ROWS_SLICE)}
    return {
        slice_: own
        for slice_, own in slices.items()
        if all(file.lies_in(slice_) for file in own) and sum(file.size for file in own) < GOOD_FILE_BYTES
    }


def _hours(day: str, slices: dict[Slice, list[Stored]], now_ms: int) -> Iterator[Fold]:
    """Fold the slices of each hour. The last slice of an hour may end after it."""
    for hour, some in groupby(slices, key=lambda slice_: slice_.start_ms // HOUR_MS):
        begun = list(some)
        if now_ms >= max(begun[-1].end_ms, (hour + 1) * HOUR_MS) + HOUR_REST_MS:
            packs = _packs(slices[slice_] for slice_ in begun)
            yield from (Fold(day=day, files=tuple(few)) for few in packs if len(few) > 1)


def _whole_day(day: str, slices: list[list[Stored]], folded: Sequence[Stored]) -> Iterator[Fold]:
    """Fold all slices of a day, and folded files of similar size with the same columns."""
    if folded or sum(map(len, slices)) > 1:
        yield from (Fold(day=day, files=tuple(few)) for few in _packs(slices))
    # Files with the same columns lie in one folder.
    for _, files in groupby(folded, key=lambda file: value_of(file.path)):
        for few in _packs([file] for file in sorted(files, key=lambda file: file.first or 0)):
            sizes: list[File] = sorted(((file.path, file.size) for file in few), key=lambda file: file[1])
            if found := similar(sizes):
                yield Fold(day=day, files=tuple(file for file in few if file.path in found))


def _packs(units: Iterable[list[Stored]]) -> Iterator[list[Stored]]:
    """Yield groups of files, in order, of up to the size of a folded file. The files of a slice stay together."""
    found = list[Stored]()
    for unit in units:
        together = [*found, *unit]
        if found and (sum(file.size for file in together) > _MOST_BYTES or len(together) > _MOST_FILES):
            yield found
            together = unit
        found = together
    if found:
        yield found


def failed_lately(path: Folder) -> dict[str, float]:
    """Return the first file of each fold that failed within a day, in any process, and when it failed."""
    now = time.time()
    try:
        failed = {str(file): float(at) for file, at in json.loads((path / _FAILED).read_text()).items()}
    except (FileNotFoundError, ValueError, AttributeError, TypeError):
        return {}
    # A time in the future came from a wrong clock.
    return {file: at for file, at in failed.items() if 0 <= now - at < _TRY_AGAIN_SECONDS}


def remember_failed(path: Folder, fold: Fold) -> None:
    """Record a failed fold, so that it is not tried for a day and others get their turn."""
    failed = failed_lately(path) | {fold.files[0].path: time.time()}
    write_whole(path / _FAILED, json.dumps(failed).encode())


# -- Writing --


def write_folded(rows: ds.FileSystemDataset, day: str, stage: Folder) -> tuple[list[Folder], int]:
    """Write the rows of files, in order, into one file per set of columns; return these files and the row count."""
    groups = defaultdict[tuple[str, ...], list[ds.Fragment]](list)
    fragments = list(rows.get_fragments())
    for fragment, schema in zip(fragments, for_each(stage, attrgetter("physical_schema"), fragments), strict=True):
        # A staged file has one column more than the table.
        known = (name for name in schema.names if name in rows.schema.names)
        groups[tuple(name for name in known if name not in _STAMP)].append(fragment)
    files, total = list[Folder](), 0
    for names, alike in groups.items():
        file = stage / folder_of(day, names) / "rows.parquet"
        some = ds.FileSystemDataset(alike, rows.schema, rows.format, rows.filesystem)
        if count := write_rows(some, names, file):
            files.append(file)
            total += count
    return files, total


def why_unreadable(rows: ds.FileSystemDataset) -> str | None:
    """Read all rows; return why they cannot be read, or None if they can."""
    try:
        for _ in rows.to_batches():
            pass
    except (OSError, pa.ArrowException) as error:
        return str(error)
    return None


def write_without(rows: ds.FileSystemDataset, slices: Iterable[Slice], file: Folder) -> int:
    """Write the rows of a folded file without those of some slices; return how many are left."""
    (fragment,) = rows.get_fragments()
    names = [name for name in fragment.physical_schema.names if name not in _STAMP]
    return write_rows(rows, names, file, ~within(slices))


def write_rows(rows: ds.Dataset, names: Sequence[str], file: Folder, only: ds.Expression | None = None) -> int:
    """Write rows with these columns and those of `_STAMP`, a few at a time; return how many there are."""
    columns = [*names, *_STAMP]
    schema = pa.schema([rows.schema.field(name) for name in columns])
    file.parent.mkdir(parents=True, exist_ok=True)
    name, files = arrow_place(file)
    count = 0
    with pq.ParquetWriter(name, schema, filesystem=files) as writer:
        for few in _groups(rows.scanner(columns=columns, filter=only).to_batches()):
            # Twice the size, so that a slightly larger batch does not leave a tiny group.
            writer.write_table(few, row_group_size=2 * _GROUP_ROWS)
            count += few.num_rows
    return count


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the rows, in order, in tables of at least `_GROUP_ROWS` rows. Only the last table may be smaller."""
    waiting, rows = list[pa.RecordBatch](), 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= _GROUP_ROWS:
            yield pa.Table.from_batches(waiting)
            waiting, rows = [], 0
    if rows:
        yield pa.Table.from_batches(waiting)
