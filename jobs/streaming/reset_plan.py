"""The plan of a reset: where each query begins, and which offsets and rows are read again, passed over or cleared."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from rich.table import Table
from rich.text import Text

from jobs.broker.kafka import TopicState
from jobs.lake.stream_tables import Note, Ranges
from jobs.pipelines import INGEST, SOURCES, STREAMS
from jobs.pipelines.layout import ASIDE
from jobs.pipelines.source import Source
from jobs.refusal import Refusal
from jobs.times import iso, parse_time


class To(StrEnum):
    """Where the next checkpoint begins."""

    EARLIEST = "earliest"
    LATEST = "latest"
    TIMESTAMP = "timestamp"
    # The end of the records that `ingest` has landed.
    LANDED = "landed"


def target(name: str) -> To:
    """The target of that name."""
    try:
        return To(name)
    except ValueError as error:
        raise Refusal(f"--to {name!r}: choose one of {', '.join(To)}") from error


@dataclass(frozen=True, kw_only=True)
class Request:
    """The request of an operator. ``sources`` choose among those of `ingest`; without any, all are meant."""

    job: str
    to: To
    timestamp_ms: int | None = None
    sources: tuple[str, ...] = ()

    @classmethod
    def of(cls, job: str, to: str, timestamp: str | None, sources: Iterable[str]) -> Self:
        """The request in the words of an operator: the name of a target, and a time as ISO 8601."""
        known, timestamp_ms = target(to), parse_time(timestamp) if timestamp else None
        return cls(job=job, to=known, timestamp_ms=timestamp_ms, sources=tuple(sources))

    def __post_init__(self) -> None:
        """Refuse a request that makes no sense."""
        if self.job not in STREAMS:
            raise Refusal(f"there is no streaming job {self.job!r}: choose one of {', '.join(STREAMS)}")
        if self.sources and self.job != INGEST:
            raise Refusal(f"{self.job!r} reads one source only: leave out --source, which is for {INGEST!r}")
        if unknown := sorted(set(self.sources) - set(SOURCES)):
            raise Refusal(f"there is no source {', '.join(unknown)}: choose among {', '.join(SOURCES)}")
        if (self.to is To.TIMESTAMP) != (self.timestamp_ms is not None):
            raise Refusal(
                "give --timestamp with --to timestamp, and only with it, e.g. --timestamp 2026-01-31T12:00:00Z"
            )
        # Kafka takes a negative number for a name of an offset, such as -1 for the latest.
        if self.timestamp_ms is not None and self.timestamp_ms < 0:
            raise Refusal(f"--timestamp {iso(self.timestamp_ms)} is before 1970: choose --to earliest")

    @property
    def words(self) -> str:
        """The target in words, with the time if there is one."""
        return self.to.value if self.timestamp_ms is None else f"timestamp {iso(self.timestamp_ms)}"

    @property
    def command(self) -> str:
        """The command that makes the same request.

        >>> Request(job="rolling_sum", to=To.TIMESTAMP, timestamp_ms=1_800_000_000_000).command
        'tideline reset rolling_sum --to timestamp --timestamp 2027-01-15T08:00:00.000Z'
        """
        words = ["tideline", "reset", self.job, "--to", self.to.value]
        words += ["--timestamp", iso(self.timestamp_ms)] if self.timestamp_ms is not None else []
        return shlex.join([*words, *(word for name in self.sources for word in ("--source", name))])


@dataclass(frozen=True, kw_only=True)
class Query:
    """One streaming query: a pipeline's, or one of `ingest`. ``folder`` is its checkpoint, below the lake's root."""

    job: str
    source: Source
    table: str
    partition: str
    folder: str
    fingerprint: str | None = None

    @property
    def clears(self) -> bool:
        """Whether a reset clears its rows; landed rows stay."""
        return self.job != INGEST


@dataclass(frozen=True, kw_only=True)
class Move:
    """One partition: how far its table is (None if the table has nothing of it), and where the stream will begin.

    >>> back = Move(partition=0, table_end=100, start=40)
    >>> forth = Move(partition=0, table_end=100, start=120)
    >>> back.read_again, back.passed_over
    (60, 0)
    >>> forth.read_again, forth.passed_over
    (0, 20)
    """

    partition: int
    table_end: int | None
    start: int

    @property
    def read_again(self) -> int:
        """How many offsets are read a second time."""
        return max(0, (self.table_end or 0) - self.start)

    @property
    def passed_over(self) -> int:
        """How many offsets will not be read."""
        return max(0, self.start - (self.table_end or 0))


@dataclass(frozen=True, kw_only=True)
class QueryReset:
    """The reset of one streaming query: of its table, and of its checkpoint if it has one."""

    query: Query
    topic: TopicState
    moves: tuple[Move, ...]
    rows: int
    checkpoint: str | None
    write_id: str

    @property
    def effect(self) -> str:
        """The effect on rows and checkpoint, in words."""
        query, passed = self.query, sum(move.passed_over for move in self.moves)
        rows = f"{self.rows:,} rows of {query.table} are {'cleared' if query.clears else 'kept'}"
        lost = f"; {passed:,} offsets are skipped and recorded as lost" if passed and not query.clears else ""
        aside = f"; the old checkpoint {query.folder} ({self.checkpoint}) moves to {ASIDE}" if self.checkpoint else ""
        return f"{query.source.name}: {rows}{lost}{aside}"

    def loss(self, words: str) -> str | None:
        """A sentence that names every range noted as lost, or None; ``words`` are the target of the reset."""
        source, gaps = self.query.source.name, [move for move in self.moves if self._lost(move)]
        ranges = ", ".join(
            f"partition {move.partition} [{move.start - move.passed_over}, {move.start})" for move in gaps
        )
        count = f"at most {sum(move.passed_over for move in gaps):,} records"
        return f"{source}: the reset to {words} skipped {count}, which are not landed: {ranges}" if gaps else None

    def note(self, epoch: int) -> Note:
        """The note of the commit. For `ingest` it covers the offsets passed over, too, so that no gap is left."""
        offsets = {move.partition: (move.start - self._lost(move), move.start) for move in self.moves}
        return Note(
            job=self.query.job,
            write_id=self.write_id,
            batch=None,
            epoch=epoch,
            cluster_id=self.topic.cluster_id,
            topics={self.query.source.name: Ranges(topic_id=self.topic.topic_id, offsets=offsets)},
            fingerprint=self.query.fingerprint,
        )

    def _lost(self, move: Move) -> int:
        """How many offsets of a partition are noted as lost. Only a reset of `ingest` notes them."""
        return 0 if self.query.clears else move.passed_over

    def as_row(self) -> dict[str, Any]:
        """The reset as one object, for programs."""
        partitions = [
            {
                "partition": move.partition,
                "table": move.table_end,
                "start": move.start,
                "read_again": move.read_again,
                "passed_over": move.passed_over,
                "lost": self._lost(move),
            }
            for move in self.moves
        ]
        return {
            "job": self.query.job,
            "source": self.query.source.name,
            "table": self.query.table,
            "rows": self.rows,
            "rows_cleared": self.rows if self.query.clears else 0,
            "checkpoint": self.query.folder,
            "checkpoint_state": self.checkpoint,
            "partitions": partitions,
        }


@dataclass(frozen=True, kw_only=True)
class ResetPlan:
    """The whole plan of a reset, before or after it was carried out."""

    queries: tuple[QueryReset, ...]

    def as_rows(self) -> list[dict[str, Any]]:
        """One object per query, for programs."""
        return [query.as_row() for query in self.queries]

    def table(self) -> Table:
        """A table with one line per partition, for people."""
        shown = Table("source", "partition", "table ends at", "begins at", "read again", "skipped")
        for query in self.queries:
            for move in query.moves:
                at = "-" if move.table_end is None else f"{move.table_end:,}"
                numbers = (f"{number:,}" for number in (move.start, move.read_again, move.passed_over))
                style = "red" if move.passed_over else "green" if move.read_again else "dim"
                shown.add_row(*map(Text, (query.query.source.name, str(move.partition), at, *numbers)), style=style)
        return shown

    def effects(self) -> list[str]:
        """The effect on each table and checkpoint, in words for people."""
        return [query.effect for query in self.queries]
