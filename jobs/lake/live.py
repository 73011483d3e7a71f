"""`live/<pipeline>` for its readers: its rows and micro-batches at one version, and the request to remove rows."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable

from jobs.lake.batch_rows import complete_since
from jobs.lake.columns import TIME
from jobs.lake.delta.reading import dataset, files_with_sizes, table_at, value_of
from jobs.lake.stream_tables import Note, note_at
from jobs.pipelines.layout import BATCHES_SLICE
from jobs.pipelines.pipeline import Pipeline
from jobs.storage.documents import Documents
from jobs.storage.folders import Folder

# The document in the control folder of the live job.
_PRUNE = "prune"


@dataclass(frozen=True, kw_only=True)
class BatchRange:
    """The offsets [start, end) that a micro-batch read from a partition, and the watermark that dropped late events."""

    partition: int
    start: int
    end: int
    watermark: datetime


@dataclass(frozen=True, kw_only=True)
class Live:
    """The live table of a pipeline at one version. It is empty if the table was never created."""

    path: Folder
    table: DeltaTable | None
    note: Note | None

    @classmethod
    def at(cls, lake_root: Folder, pipeline: Pipeline) -> Self:
        """Pin the newest version of the table."""
        path = lake_root / pipeline.live_table
        table = table_at(path)
        return cls(path=path, table=table, note=note_at(path, table.version()) if table else None)

    def reached(self, topic: str) -> dict[int, int]:
        """Return how far the stream is: the end of its newest micro-batch, or the begin that a reset gave it."""
        return dict(self.note.ends.get(topic, {})) if self.note else {}

    def begins(self, topic: str) -> dict[int, int]:
        """Return where the stream began: at the starts of its first batch, or at the reset if there is no batch yet.

        A partition that was added later is absent: it began at 0.
        """
        batches = self._batches()
        if batches is None:
            return self.reached(topic)
        # Only a reset removes the row about the first batch, together with all others.
        first = pc.min(batches.to_table(["batch"]).column("batch"))
        row = batches.to_table(["offsets"], filter=ds.field("batch") == first).to_pylist()[0]
        return {int(partition): start for partition, (start, _) in json.loads(row["offsets"]).items()}

    def topic_id(self, topic: str) -> str | None:
        """Return the id of the topic that the stream reads; None if it has read nothing yet."""
        return self.note.topic_id(topic) if self.note else None

    def slices(self) -> set[str]:
        """Return the slices that have live rows."""
        return {value_of(file) for file in self._files()} - {BATCHES_SLICE}

    def files(self, slices: Collection[str]) -> list[str]:
        """Return the files of these slices."""
        return [str(self.path / file) for file in self._files() if value_of(file) in slices]

    def complete_since(self) -> datetime | None:
        """Return the time from which on each batch has a row; None if no row was removed yet."""
        batches = self._batches()
        return None if batches is None else complete_since(batches)

    def batch_ranges(self, since: datetime) -> list[BatchRange]:
        """Return the offsets of all micro-batches that were planned since a moment."""
        batches = self._batches()
        if batches is None:
            return []
        rows = batches.to_table(columns=["offsets", "watermark"], filter=ds.field("as_of") >= pa.scalar(since, TIME))
        return [
            BatchRange(partition=int(partition), start=start, end=end, watermark=row["watermark"])
            for row in rows.to_pylist()
            for partition, (start, end) in json.loads(row["offsets"]).items()
            if start < end
        ]

    def _batches(self) -> ds.Dataset | None:
        """The rows about batches; None if there are none, as in a table that was only reset."""
        files = [file for file in self._files() if value_of(file) == BATCHES_SLICE]
        return dataset(self.table, self.path, files) if self.table is not None and files else None

    def _files(self) -> list[str]:
        return list(files_with_sizes(self.table)) if self.table is not None else []


@dataclass(frozen=True, kw_only=True)
class PruneRequest:
    """The account's request to the live job: remove the rows of ``slices``, which are final and explained."""

    # The name of a slice. All requests so far have named only slices before it. Empty before the first request.
    before: str = ""
    slices: tuple[str, ...] = ()

    @classmethod
    def read(cls, documents: Documents) -> Self:
        """Return the newest request in the live job's control folder, or an empty one."""
        asked = documents.read(_PRUNE) or {}
        return cls(before=str(asked.get("before", "")), slices=tuple(asked.get("slices", ())))

    def write(self, documents: Documents) -> None:
        """Replace the request in the live job's control folder."""
        documents.replace(_PRUNE, {"before": self.before, "slices": sorted(self.slices)})
