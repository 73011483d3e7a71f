"""`final/<pipeline>`: the published slices. Rows and headers of a slice are added and removed in one commit.

A slice's rows lie in a folder of their own. The headers of a day's slices lie in one small file. So a slice is replaced
by a change of metadata, and a few files show which slices are final. Later the rows of many slices are folded into
one file of their day (`folding`). The rows of a slice lie in its own folder or in folded files, never in both.
"""

import json
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable

from jobs.lake.columns import adapt, columns_of, schema_of
from jobs.lake.delta.fenced import HOUR_SECONDS, Action, FencedTable, kept_for, opened, set_properties
from jobs.lake.delta.reading import dataset, files_with_sizes, table_at, value_of
from jobs.lake.folding import (
    Fold,
    Stored,
    by_day,
    due,
    failed_lately,
    of_day,
    remember_failed,
    stored,
    why_unreadable,
    within,
    write_folded,
    write_without,
)
from jobs.lake.publication import Publication, PublishedMeanwhileError, UnreadableRowsError
from jobs.lake.slices import Header
from jobs.pipelines.layout import HEADERS_SLICE
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import Slice, day_of_slice, slice_named
from jobs.refusal import Refusal
from jobs.settings import KeptDays
from jobs.storage.folders import Folder
from jobs.storage.parquet import footer, read, write

log = logging.getLogger(__name__)

# A column of staged files: from how many rows of the transform a window was made. The table's schema does not have it,
# so readers do not see it after the publish.
INPUTS = "_inputs"
# Replaced files are kept for weeks, in many folders. A search every hour would take long and find little.
_DELETE_EVERY_SECONDS = 24 * HOUR_SECONDS
# A turn folds for about this long. After an upgrade a year of slices may be due: the next turns fold the rest.
_FOLD_SECONDS = 20.0


class FinalTable(FencedTable):
    """The final rows of a pipeline. A writer must hold the lease of the pipeline's recompute."""

    def __init__(self, pipeline: Pipeline, path: Folder, table: DeltaTable) -> None:
        """Use `open` or `read`."""
        super().__init__(path, table)
        self._pipeline = pipeline
        self._files: tuple[int, list[tuple[str, int]]] | None = None
        self._stored: tuple[int, list[Stored]] | None = None
        self._days: tuple[int, dict[str, tuple[int, int]]] | None = None
        # File -> its headers. Files never change, and most days keep their files.
        self._read: dict[str, list[Header]] = {}

    @classmethod
    def open(cls, lake_root: Folder, pipeline: Pipeline) -> Self:
        """Open the table to write. Create it if it is missing, and add the columns of a changed definition.

        The table also gets the present setting of how long versions of slices are kept.
        """
        path, kept = lake_root / pipeline.final_table, _retention()
        table = opened(path, schema_of(pipeline), "slice", {"delta.checkpointInterval": "50", **kept})
        adapt(table, schema_of(pipeline), path)
        set_properties(table, path, kept)
        return cls(pipeline, path, table)

    @classmethod
    def read(cls, lake_root: Folder, pipeline: Pipeline, version: int | None = None) -> Self | None:
        """Open the table to read, at its newest or an earlier version; return None if nothing was ever published."""
        path = lake_root / pipeline.final_table
        table = table_at(path, version)
        return cls(pipeline, path, table) if table else None

    def days(self) -> list[str]:
        """Return the days on which final slices begin, in order."""
        return sorted(self._files_of_headers())

    def slices_by_day(self) -> dict[str, int]:
        """Count the final slices per day on which they begin, by the log alone."""
        return {day: slices for day, (slices, _) in self._files_of_headers().items()}

    def days_changed_since(self, time_ms: int) -> set[str]:
        """Return the days with slices that were published since a moment, by the log alone."""
        return {day for day, (_, placed_ms) in self._files_of_headers().items() if placed_ms >= time_ms}

    def newest_ms(self) -> int:
        """Return the time of the last publish, by the publisher's clock; 0 if there was none. Only the log is read."""
        return max((placed_ms for _, placed_ms in self._files_of_headers().values()), default=0)

    def _files_of_headers(self) -> dict[str, tuple[int, int]]:
        """Each day's number of headers, and when their file was placed; looked up once per version."""
        if self._days is None or self._days[0] != self.version:
            self._days = self.version, files_of_headers(self._table)
        return self._days[1]

    def headers(self, days: Collection[str] | None = None) -> dict[str, Header]:
        """Return the header of every final slice, or only of slices that begin on these days."""
        wanted = self.days() if days is None else days
        files = [file for day in wanted for file in self._in_folder(HEADERS_SLICE + day)]
        found = {header.slice: header for header in self._headers_in(files)}
        for header in found.values():
            if header.slice_seconds != self._pipeline.slice_seconds:
                raise Refusal(
                    f"{self._pipeline.final_table} has slices of {header.slice_seconds} s, the definition says "
                    f"slice_seconds={self._pipeline.slice_seconds}: take the change back, or give the pipeline another "
                    "name; slices that overlap would serve windows twice"
                )
        return found

    def header(self, slice_: str) -> Header | None:
        """Return the header of a slice; None if it is not final."""
        return self.headers({day_of_slice(slice_)}).get(slice_)

    def _headers_in(self, files: Iterable[str]) -> list[Header]:
        wanted = list(files)
        for file in wanted:
            if file not in self._read:
                texts = read(self.path / file, ["header"]).column("header")
                self._read[file] = [Header.from_json(text) for text in texts.to_pylist()]
        return [header for file in wanted for header in self._read[file]]

    def rows(self, slice_: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of a slice. Columns that a changed definition has added since are null."""
        names = columns_of(self._pipeline).names if columns is None else list(columns)
        files, only = self._of_slice(slice_)
        return dataset(self._table, self.path, files, schema_of(self._pipeline)).to_table(columns=names, filter=only)

    def _of_slice(self, slice_: str) -> tuple[Collection[str], ds.Expression | None]:
        """The files with the rows of a slice, and a filter for these rows if the files have others, too."""
        if own := self._in_folder(slice_):
            return own, None
        wanted = [slice_named(self._pipeline, slice_)]
        return [file.path for file, _ in self._folded_files_of(wanted)], within(wanted)

    def files_of(self, slices: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the files with the rows of these slices: own files, and folded files with rows of others, too."""
        own = {name: self._in_folder(name) for name in sorted(slices)}
        others = (slice_named(self._pipeline, name) for name, files in own.items() if not files)
        folded = [str(self.path / file.path) for file, _ in self._folded_files_of(others)]
        return [str(self.path / file) for files in own.values() for file in files], folded

    def has_columns_of_now(self, slice_: str) -> bool:
        """Whether the rows of a slice were written with the columns of today's definition, in their order."""
        names = columns_of(self._pipeline).names
        others = {INPUTS, *schema_of(self._pipeline).names}.difference(names)
        files, only = self._of_slice(slice_)
        # Only files that really have rows of the slice count: folded files of other slices may have other columns.
        having = [file for file in files if only is None or self._dataset([file]).count_rows(filter=only)]
        schemas = (footer(self.path / file).schema.to_arrow_schema() for file in having)
        return all([name for name in schema.names if name not in others] == names for schema in schemas)

    def _dataset(self, files: Iterable[str]) -> ds.FileSystemDataset:
        return dataset(self._table, self.path, files)

    def _folded_files_of(self, slices: Iterable[Slice]) -> Iterator[tuple[Stored, list[Slice]]]:
        """Yield the folded files that may have windows of some slices, each with these slices."""
        for day, some in by_day(slices).items():
            for file in of_day(self._all_stored(), day):
                if touching := [slice_ for slice_ in some if file.may_touch(slice_)]:
                    yield file, touching

    def _all_stored(self) -> list[Stored]:
        """The files of rows, with the log's bounds of their windows; looked up once per version."""
        if self._stored is None or self._stored[0] != self.version:
            self._stored = self.version, stored(self._table)
        return self._stored[1]

    def _in_folder(self, value: str) -> dict[str, int]:
        """The files of a partition, and their sizes."""
        files, folder = self._all_files(), f"slice={value}/"
        first = bisect_left(files, (folder, 0))
        return dict(takewhile(lambda file: file[0].startswith(folder), islice(files, first, None)))

    def _all_files(self) -> list[tuple[str, int]]:
        """All files, in order; looked up once per version, because a run may ask for thousands of slices."""
        if self._files is None or self._files[0] != self.version:
            self._files = self.version, sorted(files_with_sizes(self._table).items())
        return self._files[1]

    def publish(self, publications: Sequence[Publication]) -> None:
        """Replace rows and headers of these slices in one commit; refuse if another run has published one of them."""
        # Only a slice with an earlier version, and without files in its own folder, can have rows in folded files.
        replaced = [p.header.slice for p in publications if p.header.version > 1]
        folded = [slice_named(self._pipeline, name) for name in replaced if not self._in_folder(name)]
        # Folded files with rows of these slices are written again, without those rows.
        actions = [each for file, some in self._folded_files_of(folded) for each in self._without(file, some)]
        for day in sorted({day_of_slice(publication.header.slice) for publication in publications}):
            old = self._in_folder(HEADERS_SLICE + day)
            headers = {header.slice: header for header in self._headers_in(old)}
            changed = [p.header for p in publications if p.header.slice.startswith(day)]
            for header in changed:
                self.require_version(headers.get(header.slice), header)
            actions += [self.removal(file, size) for file, size in old.items()]
            headers |= {header.slice: header for header in changed}
            with self.staged() as stage:
                actions.append(self.place(self._write_headers(stage, day, headers)))
        for publication in publications:
            actions += [self.removal(file, size) for file, size in self._in_folder(publication.header.slice).items()]
            actions += self._place_whole(publication)
        versions = {p.header.slice: p.header.version for p in publications}
        runs = sorted({p.header.run for p in publications})
        self.transact(actions, json.dumps({"runs": runs, "versions": versions}, separators=(",", ":")))

    def _without(self, file: Stored, slices: Sequence[Slice]) -> list[Action]:
        """Replace a folded file by one without the rows of these slices; do nothing if it has no such rows."""
        rows = self._dataset([file.path])
        try:
            if not rows.count_rows(filter=within(slices)):
                return []
            with self.staged() as stage:
                left = stage / file.path.rpartition("/")[0] / "rows.parquet"
                placed = [self.place(left)] if write_without(rows, slices, left) else []
        except (OSError, pa.ArrowException) as error:
            # The error may also come from the write, so the rows are read once more to find out.
            if why := why_unreadable(rows):
                names = [slice_.name for slice_ in slices]
                raise UnreadableRowsError(names, self._pipeline.final_table, f"{file.path}: {why}") from error
            raise
        return [self.removal(file.path, file.size), *placed]

    def _place_whole(self, publication: Publication) -> list[Action]:
        """Place the staged files. Refuse them if they have more or fewer rows than the audit saw."""
        header = publication.header
        footers = {file: footer(file) for file in publication.files}
        rows = sum(each.num_rows for each in footers.values())
        if rows != header.rows:
            raise Refusal(
                f"{rows:,} rows of slice {header.slice} are staged, but its audit judged {header.rows:,}: clear the "
                f"task recompute of run {header.run}, or leave the slice to the next run"
            )
        return [self.place(file, keep=True, known=known) for file, known in footers.items()]

    def require_version(self, now: Header | None, planned: Header) -> None:
        """Refuse a slice that is not at the version that the run planned to replace."""
        at = now.version if now else 0
        if at != planned.version - 1:
            by = f" by run {now.run}" if now else ""
            raise PublishedMeanwhileError(
                f"slice {planned.slice} is at version {at}{by}, not at {planned.version - 1} as run {planned.run} had "
                "planned: another run has published it meanwhile, and those rows stay; to compute it again, restate "
                "the slice"
            )

    def maintain(self, check: Callable[[], None], now_ms: int) -> None:
        """Fold files of slices that ended long ago, and now and then delete files that no roll-back can use.

        ``check`` is called before each commit. It must raise if another process has taken over the lease.
        """
        self.fold(check, now_ms)
        self.delete_now_and_then(_DELETE_EVERY_SECONDS)

    def fold(self, check: Callable[[], None], now_ms: int, seconds: float = _FOLD_SECONDS) -> None:
        """Fold the files that are due, for about ``seconds``; the rest waits for the next turn."""
        began = time.monotonic()
        failed = failed_lately(self.path)
        wanted = (each for each in due(self._all_stored(), self._pipeline, now_ms) if each.files[0].path not in failed)
        for number, each in enumerate(wanted):
            if number and time.monotonic() - began > seconds:
                log.info("the other files of %s are folded later", self.path.name)
                return
            if not self._fold(each, check):
                remember_failed(self.path, each)

    def _fold(self, fold: Fold, check: Callable[[], None]) -> bool:
        """Fold in one commit that changes no row; return False if the files cannot be folded."""
        began, actions = time.monotonic(), list[Action]()
        with self.staged() as stage:
            try:
                files, rows = write_folded(self._dataset(file.path for file in fold.files), fold.day, stage)
            except (OSError, pa.ArrowException) as error:
                # The rows stay published. One unreadable file must not stop the next slices.
                log.error("files of %s of %s are not folded: %s", self.path.name, fold.day, error)
                return False
            if rows != fold.rows:
                log.error(
                    "files of %s of %s are not folded: they have %d rows, but %d by the log of the table",
                    *(self.path.name, fold.day, rows, fold.rows),
                )
                return False
            actions += [self.place(file, data_change=False) for file in files]
        actions += [self.removal(file.path, file.size, data_change=False) for file in fold.files]
        check()
        self.transact(actions, json.dumps({"folded": fold.day}, separators=(",", ":")))
        log.info(
            "folded %d files of %s of %s into %d in %.1f s",
            *(len(fold.files), self.path.name, fold.day, len(files), time.monotonic() - began),
        )
        return True

    def _write_headers(self, stage: Folder, day: str, headers: Mapping[str, Header]) -> Folder:
        ordered = [headers[name] for name in sorted(headers)]
        file = stage / f"slice={HEADERS_SLICE}{day}" / "headers.parquet"
        columns: dict[str, Any] = {
            "version": pa.array([header.version for header in ordered], pa.int64()),
            "final_slice": [header.slice for header in ordered],
            "header": [header.to_json() for header in ordered],
        }
        write(pa.table(columns), file)
        return file

    def table_version_with(self, slice_: str, version: int) -> int | None:
        """Return the newest version of the table in which a slice has this version; None if the log shows none.

        Example: the versions 1 and 2 of the slice were published by the versions 5 and 9 of the table. For version 1
        this returns 8. The slice's rows are the same in 5, but the files of 5 may have been folded and deleted since.
        """
        newest: int | None = None
        for number, metadata in self.metadata():
            brought = metadata.get("versions", {}).get(slice_, 0)
            if brought == version:
                return self.version if newest is None else newest
            if brought > version:
                newest = number - 1
        # The log no longer has the commit of this version. The header at ``newest`` shows if the slice had it then.
        return newest


def files_of_headers(table: DeltaTable) -> dict[str, tuple[int, int]]:
    """Return, for each day with final slices, the number of headers in its file, and when the file was placed."""
    actions = pa.table(table.get_add_actions(flatten=True))
    if not actions.num_rows:
        return {}
    # A table has tens of thousands of files with rows, and one file of headers for each day.
    headers = actions.filter(pc.starts_with(actions["path"], f"slice={HEADERS_SLICE}"))
    columns = (headers[name].to_pylist() for name in ("path", "num_records", "modification_time"))
    files = zip(*columns, strict=True)
    return {value_of(path).removeprefix(HEADERS_SLICE): (rows, placed_ms) for path, rows, placed_ms in files}


def _retention() -> dict[str, str]:
    """The properties that limit how long a slice can be rolled back."""
    return kept_for(f"{KeptDays.from_env().final_versions} days")
