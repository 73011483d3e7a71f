"""A stream as Spark runs it, in plain Python: the events it counts, its rows, and how it differs from final."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession

from jobs.pipelines import PIPELINES
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.shipped.sources import ORDERS
from jobs.pipelines.slices import slice_at
from jobs.pipelines.window import Measure
from jobs.pipelines.window import Window as Windows
from jobs.transforms import drift
from tests.judges import oracle
from tests.judges.oracle import State

T0 = 1_790_000_000_000
EVENTS = "partition INT, offset BIGINT, arrival_time TIMESTAMP, event_time TIMESTAMP"
BATCHES = "partition INT, start BIGINT, end BIGINT, watermark TIMESTAMP"
FINALS = "slice STRING, version BIGINT, offsets MAP<INT, BIGINT>, begins MAP<INT, BIGINT>, reached MAP<INT, BIGINT>"
TUMBLING = replace(PIPELINES["rolling_sum"], slice_seconds=2)
SLIDING = replace(PIPELINES["rolling_sum_sliding"], slice_seconds=1)
WORDS = replace(PIPELINES["word_count"], window=Windows.tumbling(size_ms=1000), slice_seconds=2)
BY_CUSTOMER = Pipeline(
    name="by_customer",
    description="Orders of each customer.",
    source=ORDERS,
    transform="SELECT event_time, customer, amount FROM {orders}",
    keys=("customer",),
    window=Windows.tumbling(size_ms=1000),
    measures=(
        Measure(name="total", sql="sum(amount)", type="DECIMAL(28,6)"),
        Measure(name="mean", sql="sum(amount) / count(*)", type="DECIMAL(28,10)"),
        Measure(name="events", sql="count(*)", type="BIGINT"),
    ),
    output="by_customer",
    slice_seconds=2,
)
COLUMNS = {
    "numbers": "key STRING, id BIGINT, value DECIMAL(18,6)",
    "lines": "text STRING",
    "orders": "order_id STRING, customer STRING, amount DECIMAL(18,6)",
}


@dataclass(frozen=True)
class Event:
    """An accepted record. ``name`` is its key, customer or text; duplicates share an ``id``."""

    partition: int
    offset: int
    event_ms: int
    name: str = "a"
    value: Decimal = Decimal(1)
    id: int = 0
    arrival_ms: int = T0

    def row(self, pipeline: Pipeline) -> tuple[Any, ...]:
        values: dict[str, tuple[Any, ...]] = {
            "numbers": (self.name, self.id, self.value),
            "lines": (self.name,),
            "orders": (str(self.id), self.name, self.value),
        }
        return (self.partition, self.offset, at(self.arrival_ms), at(self.event_ms), *values[pipeline.source.name])

    def adds(self, pipeline: Pipeline) -> list[tuple[str, Decimal]]:
        if pipeline.source.name == "lines":
            return [(word, Decimal(0)) for word in self.name.split()]
        return [(self.name, self.value)]


@dataclass(frozen=True)
class Batch:
    """The ranges of a micro-batch: partition -> [start, end)."""

    ranges: Mapping[int, tuple[int, int]]
    watermark_ms: int
    as_of_ms: int = T0

    def holds(self, event: Event) -> bool:
        start, end = self.ranges.get(event.partition, (0, 0))
        return start <= event.offset < end


@dataclass
class Scene:
    """Events, the batches of a stream, and the offsets in the header of each slice."""

    pipeline: Pipeline
    events: Sequence[Event]
    batches: Sequence[Batch]
    finals: Mapping[str, Mapping[int, int]]
    # Errors that are added to live rows, and to final ones.
    planted: dict[tuple[int, str], int] = field(default_factory=dict)
    planted_in_final: dict[tuple[int, str], int] = field(default_factory=dict)

    def windows(self, event: Event) -> Iterator[int]:
        window = self.pipeline.window
        for start in oracle.windows_of(event.event_ms, window.size_ms, window.slide_ms):
            if self.slice(start) in self.finals:
                yield start

    def slice(self, start_ms: int) -> str:
        return slice_at(self.pipeline, start_ms).name

    def batch_of(self, event: Event) -> int | None:
        return next((number for number, batch in enumerate(self.batches) if batch.holds(event)), None)

    def counts(self, event: Event, start: int) -> bool:
        """Whether the stream counts an event in a window, by Spark's rules."""
        number = self.batch_of(event)
        delay_ms = self.pipeline.watermark_delay_seconds * 1000
        if number is None or event.event_ms > event.arrival_ms + delay_ms:
            return False
        return start + self.pipeline.window.size_ms > self.batches[number].watermark_ms

    def final_events(self, start: int) -> list[Event]:
        offsets = self.finals[self.slice(start)]
        seen: set[Any] = set()
        found = []
        for event in sorted(self.events, key=lambda e: (e.arrival_ms, e.partition, e.offset)):
            identity = (event.event_ms, event.id) if self.pipeline.source.identity else event
            if start in self.windows(event) and event.offset < offsets.get(event.partition, 0) and identity not in seen:
                seen.add(identity)
                found.append(event)
        return found

    def starts(self) -> set[int]:
        return {start for event in self.events for start in self.windows(event)}

    def live_rows(self) -> list[tuple[Any, ...]]:
        """Every update that the stream emits: state by state, batch by batch."""
        states: dict[tuple[int, str], State] = defaultdict(State)
        rows = []
        for number, batch in enumerate(self.batches):
            touched = set()
            for event in (event for event in self.events if batch.holds(event)):
                for start in (start for start in self.windows(event) if self.counts(event, start)):
                    for name, value in event.adds(self.pipeline):
                        add(states[start, name], value)
                        touched.add((start, name))
            for place in sorted(touched):
                rows.append(
                    (*self._row(place, states[place], self.planted.get(place, 0)), 1, number, at(batch.as_of_ms))
                )
        return rows

    def final_rows(self) -> list[tuple[Any, ...]]:
        states: dict[tuple[int, str], State] = defaultdict(State)
        for start in self.starts():
            for event in self.final_events(start):
                for name, value in event.adds(self.pipeline):
                    add(states[start, name], value)
        return [self._row(place, state, self.planted_in_final.get(place, 0)) for place, state in states.items()]

    def _row(self, place: tuple[int, str], state: State, more: int) -> tuple[Any, ...]:
        start, name = place
        values = list(oracle.measures(self.pipeline.name, state).values())
        values[-1] += more
        return (at(start), at(start + self.pipeline.window.size_ms), name, *values)

    def causes(self) -> dict[tuple[int, str], dict[str, int]]:
        """The causes of the difference between live and final, computed independently of the product."""
        found: dict[tuple[int, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for start in self.starts():
            final = self.final_events(start)
            for event in (event for event in self.events if start in self.windows(event)):
                if cause := self._cause(event, start, event in final):
                    for name in {name for name, _ in event.adds(self.pipeline)}:
                        found[start, name][cause] += 1
        return {place: dict(causes) for place, causes in found.items()}

    def _cause(self, event: Event, start: int, is_final: bool) -> str | None:
        counts = self.counts(event, start)
        if counts == is_final:
            return None
        if counts:
            within = event.offset < self.finals[self.slice(start)].get(event.partition, 0)
            return "duplicate" if within else "after_final"
        if self.batch_of(event) is None:
            if event.offset >= self.reached().get(event.partition, 0):
                return "not_reached"
            return "before_checkpoint" if event.offset < self.begins().get(event.partition, 0) else None
        return "ahead" if event.event_ms > event.arrival_ms + 5000 else "late"

    def begins(self) -> dict[int, int]:
        return {partition: start for batch in self.batches[:1] for partition, (start, _) in batch.ranges.items()}

    def reached(self) -> dict[int, int]:
        return {partition: end for batch in self.batches for partition, (_, end) in batch.ranges.items()}

    def balance(self, spark: SparkSession) -> tuple[DataFrame, DataFrame, DataFrame]:
        """The transformed events, the balance, and the slices."""
        pipeline = self.pipeline
        rows = [event.row(pipeline) for event in self.events]
        events = spark.createDataFrame(rows, f"{EVENTS}, {COLUMNS[pipeline.source.name]}")
        taken = [(p, *ends, at(b.watermark_ms)) for b in self.batches for p, ends in b.ranges.items()]
        finals = spark.createDataFrame(
            [(name, 1, dict(offsets), self.begins(), self.reached()) for name, offsets in self.finals.items()], FINALS
        )
        transformed = drift.tagged(events, pipeline, spark.createDataFrame(taken, BATCHES), 3, finals)
        types = zip(pipeline.value_columns, pipeline.value_types, strict=True)
        schema = ", ".join(["window_start TIMESTAMP, window_end TIMESTAMP", *(f"{n} {t}" for n, t in types)])
        live = spark.createDataFrame(self.live_rows(), f"{schema}, epoch BIGINT, batch BIGINT, as_of TIMESTAMP")
        final = spark.createDataFrame(self.final_rows(), schema)
        return transformed, drift.balance(transformed, live, final, pipeline), finals


def add(state: State, value: Decimal) -> None:
    state.total += value
    state.events += 1


def at(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def place(row: Row, pipeline: Pipeline) -> tuple[int, str]:
    return ms(row["window_start"]), row[pipeline.keys[0]]


def scene(
    events: Iterable[Event], *batches: Batch, pipeline: Pipeline = TUMBLING, ends: Mapping[int, int] | None = None
) -> Scene:
    """A scene whose slices around T0 are all final up to the same offsets; without ``ends``, all events are counted."""
    everything = list(events)
    names = {slice_at(pipeline, T0 + second * 1000).name for second in range(-20, 20)}
    return Scene(pipeline, everything, batches, dict.fromkeys(names, {0: 99, 1: 99} if ends is None else ends))
