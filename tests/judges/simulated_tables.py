"""The tables of a simulation. They behave as Delta's do.

A commit is there completely or not at all. It succeeds only on the version that its writer has seen. Rows are made up:
a slice has one window, which counts events. Its key changes with their number, so most new versions remove a window.
"""

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from jobs.lake.columns import columns_of
from jobs.lake.delta.fenced import OvertakenError
from jobs.lake.events import Count
from jobs.lake.final import FinalTable
from jobs.lake.ledger import LateCountPosition
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.publication import Publication
from jobs.lake.slices import Header, LedgerLine, State
from jobs.pipelines.slices import Slice
from jobs.storage.parquet import read
from tests.judges.simulated_broker import id_of, within
from tests.judges.simulated_judges import judge_commit
from tests.judges.simulated_world import SUM, World, key_of, start_of


class FinalModel:
    """`FinalTable` in memory."""

    require_version, header = FinalTable.require_version, FinalTable.header

    def __init__(self, world: World, version: int | None = None) -> None:
        self.world = world
        self.seen = len(world.history) - 1 if version is None else version

    @property
    def version(self) -> int:
        return self.seen

    def headers(self, days: Collection[str] | None = None) -> dict[str, Header]:
        found = self.world.history[self.seen].items()
        return {name: header for name, (header, _) in found if days is None or name[:8] in days}

    def days(self) -> list[str]:
        return sorted(self.slices_by_day())

    def slices_by_day(self) -> dict[str, int]:
        return Counter(name[:8] for name in self.world.history[self.seen])

    def days_changed_since(self, time_ms: int) -> set[str]:
        return {name[:8] for name, (header, _) in self.world.history[self.seen].items() if header.as_of_ms >= time_ms}

    def newest_ms(self) -> int:
        return max((header.as_of_ms for header, _ in self.world.history[self.seen].values()), default=0)

    def rows(self, slice_: str, columns: Sequence[str] | None = None) -> pa.Table:
        self.world.operate("final: read")
        found = window(self.world.history[self.seen].get(slice_))
        return found if columns is None else found.select(columns)

    def has_columns_of_now(self, slice_: str) -> bool:
        return True

    def table_version_with(self, slice_: str, version: int) -> int | None:
        for at in range(self.seen, 0, -1):
            found, before = self.world.history[at].get(slice_), self.world.history[at - 1].get(slice_)
            if found and found != before and found[0].version == version:
                return at
        return None

    @contextmanager
    def staged(self) -> Iterator[Path]:
        yield self.world.root / "stage" / uuid.uuid4().hex

    def maintain(self, check: Callable[[], None], now_ms: int) -> None:
        """Do nothing: files have no part in the protocol."""

    def publish(self, publications: Sequence[Publication]) -> None:
        world = self.world
        world.operate("final: commit")
        if self.seen != len(world.history) - 1:
            raise OvertakenError("another writer has committed")
        changed = dict(world.history[-1])
        for publication in publications:
            header = publication.header
            now = changed.get(header.slice)
            self.require_version(now[0] if now else None, header)
            content = sum(sum(read(file, ["events"])["events"].to_pylist()) for file in publication.files)
            changed[header.slice] = (header, content)
        world.history.append(changed)
        self.seen += 1
        judge_commit(world)
        world.operate("final: committed")


class LedgerModel:
    """`Ledger` in memory."""

    def __init__(self, world: World) -> None:
        self.world, self.seen = world, world.commits

    def newest(self, slices: Collection[str] | None = None) -> dict[str, LedgerLine]:
        return {entry.slice: entry for entry in self.world.lines if slices is None or entry.slice in slices}

    def unsettled(self, days: Collection[str], versions: Mapping[str, int]) -> tuple[dict[str, LedgerLine], set[str]]:
        newest = {name: line for name, line in self.newest().items() if name[:8] in days}
        settled = {
            name
            for name, line in newest.items()
            if (line.state, line.late, line.version) == (State.FINAL, 0, versions.get(name))
        }
        return {name: line for name, line in newest.items() if name not in settled}, settled

    def late_count_position(self) -> LateCountPosition | None:
        return self.world.counted

    def append(self, entries: Iterable[LedgerLine], *, counted: LateCountPosition | None = None) -> None:
        lines = list(entries)
        if not lines:
            return
        world = self.world
        world.operate("ledger: commit")
        if self.seen != world.commits:
            raise OvertakenError("another writer has committed")
        assert len({line.slice for line in lines}) == len(lines), "two lines of one slice in one commit have no order"
        world.lines += lines
        world.count(counted)
        world.note_told(lines)
        world.commits += 1
        self.seen += 1
        world.operate("ledger: committed")


class LandedModel:
    """`Landed` in memory, pinned at the records that are landed now."""

    def __init__(self, world: World) -> None:
        self.note = world.broker.note
        self.records = world.broker.landed[: self.note.landed]

    # No event of the simulation is old enough to be removed.
    events_from_ms = 0

    @property
    def version(self) -> int:
        return self.note.landed

    def topic_id(self, topic: str) -> str:
        return id_of(self.note.topic)

    def ends(self, topic: str, topic_id: str) -> dict[int, int]:
        return dict(self.note.ends) if id_of(self.note.topic) == topic_id else {}

    def first_ms(self) -> int | None:
        return min((record.time for record in self.records), default=None)

    def count(self, pipeline: object, slices: Sequence[Slice]) -> dict[str, Count]:
        counts = {slice_.name: len(within(self.records, slice_.start_ms, slice_.end_ms)) for slice_ in slices}
        return {name: Count(events=count, window_events=count) for name, count in counts.items() if count}

    def newest_arrival_ms(self) -> int:
        return max((record.arrival for record in self.records), default=0)

    def since(self, ends: Mapping[int, int], since_ms: int, before_ms: int) -> pa.Table:
        rows = [
            {"partition": each.partition, "offset": each.offset, "time": each.time, "arrival": each.arrival}
            for each in self.records
            if each.offset >= ends.get(each.partition, 0) and each.arrival > since_ms and each.time < before_ms
        ]
        return pa.Table.from_pylist(rows) if rows else pa.table({})


@dataclass(frozen=True)
class LakeModel(PipelineLake):
    """`PipelineLake` in memory: the seam at which the simulation gives its tables to the product."""

    world: World

    @classmethod
    def of(cls, world: World) -> Self:
        return cls(world.root, SUM, world)

    def events(self, version: int | None = None) -> Any:
        return LandedModel(self.world) if self.world.broker.landed else None

    def final(self, version: int | None = None) -> Any:
        return FinalModel(self.world, version)

    def open_final(self) -> Any:
        return FinalModel(self.world)

    def ledger(self) -> Any:
        return LedgerModel(self.world)

    def open_ledger(self) -> Any:
        return LedgerModel(self.world)


def window(found: tuple[Header, int] | None) -> pa.Table:
    """The one row of a slice, or no row if it has no events."""
    rows = []
    if found and found[1]:
        start = start_of(found[0].slice)
        total = Decimal(found[1])
        rows = [
            {"window_start": start, "window_end": start, "key": key_of(found[1]), "total": total, "events": found[1]}
        ]
    return pa.Table.from_pylist(rows, schema=columns_of(SUM))
