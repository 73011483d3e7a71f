"""The drift balance against a naive simulation of the stream: whatever it counts or leaves out has a cause."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, Row, SparkSession

from jobs.pipelines import PIPELINES
from jobs.pipelines.slices import slice_at, slice_named
from jobs.pipelines.sources import ORDERS
from jobs.pipelines.spec import Measure, Pipeline
from jobs.pipelines.spec import Window as Windows
from jobs.transforms import drift
from tests import oracle
from tests.oracle import State

pytestmark = pytest.mark.spark

T0 = 1_790_000_000_000
EVENTS = "partition INT, offset BIGINT, arrival_time TIMESTAMP, event_time TIMESTAMP"
BATCHES = "partition INT, start BIGINT, end BIGINT, watermark TIMESTAMP"
FINALS = "slice STRING, version BIGINT, offsets MAP<INT, BIGINT>, reached MAP<INT, BIGINT>"
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
    """An accepted record; ``name`` is its key, customer or text, ``id`` what makes two of them the same."""

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
    """What a micro-batch took: partition -> [start, end)."""

    ranges: Mapping[int, tuple[int, int]]
    watermark_ms: int
    as_of_ms: int = T0

    def holds(self, event: Event) -> bool:
        start, end = self.ranges.get(event.partition, (0, 0))
        return start <= event.offset < end


@dataclass
class Scene:
    """Events, the batches of a stream, and how far the header of each slice goes."""

    pipeline: Pipeline
    events: Sequence[Event]
    batches: Sequence[Batch]
    finals: Mapping[str, Mapping[int, int]]
    planted: dict[tuple[int, str], int] = field(default_factory=dict)

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
        """What Spark does."""
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
        return [self._row(place, state, 0) for place, state in states.items()]

    def _row(self, place: tuple[int, str], state: State, more: int) -> tuple[Any, ...]:
        start, name = place
        values = list(oracle.measures(self.pipeline.name, state).values())
        values[-1] += more
        return (at(start), at(start + self.pipeline.window.size_ms), name, *values)

    def causes(self) -> dict[tuple[int, str], dict[str, int]]:
        """What separates live from final, said once more."""
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
            return "before_checkpoint" if event.offset < self.reached().get(event.partition, 0) else "not_reached"
        return "ahead" if event.event_ms > event.arrival_ms + 5000 else "late"

    def reached(self) -> dict[int, int]:
        return {partition: end for batch in self.batches for partition, (_, end) in batch.ranges.items()}

    def balance(self, spark: SparkSession) -> tuple[DataFrame, DataFrame, DataFrame]:
        """The transformed events, the balance, and the slices."""
        pipeline = self.pipeline
        rows = [event.row(pipeline) for event in self.events]
        events = spark.createDataFrame(rows, f"{EVENTS}, {COLUMNS[pipeline.source.name]}")
        taken = [(p, *ends, at(b.watermark_ms)) for b in self.batches for p, ends in b.ranges.items()]
        finals = spark.createDataFrame(
            [(name, 1, dict(offsets), self.reached()) for name, offsets in self.finals.items()], FINALS
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
    """All slices around T0 are final up to the same offsets: all of them, if nothing is said."""
    everything = list(events)
    names = {slice_at(pipeline, T0 + second * 1000).name for second in range(-20, 20)}
    return Scene(pipeline, everything, batches, dict.fromkeys(names, {0: 99, 1: 99} if ends is None else ends))


def causes_of(spark: SparkSession, made: Scene) -> dict[tuple[int, str], dict[str, int]]:
    _, balance, _ = made.balance(spark)
    rows = balance.collect()
    assert not [row for row in rows if row["is_unexplained"]]
    return {place(row, made.pipeline): row["causes"] for row in rows if row["causes"]}


ALL = Batch({0: (0, 99), 1: (0, 99)}, 0)


def test_without_a_difference_nothing_separates_and_nothing_is_written(spark: SparkSession) -> None:
    made = scene([Event(0, 0, T0), Event(1, 7, T0 + 900, value=Decimal("2.5"))], ALL)
    transformed, balance, finals = made.balance(spark)
    assert drift.drift_rows(balance, finals, TUMBLING, "r").count() == 0
    assert drift.causes_by_slice(transformed, TUMBLING).count() == 0
    (row,) = balance.collect()
    assert row["live"] == row["final"] == row["counted"]
    assert row["unexplained"].asDict() == {"total": 0, "mean": 0, "events": 0}


def test_each_cause(spark: SparkSession) -> None:
    late, ahead, old, far, new = (
        Event(0, 12, T0, "late"),
        Event(0, 13, T0 + 6000, "ahead"),
        Event(0, 3, T0, "before"),
        Event(0, 20, T0, "behind"),
        Event(2, 0, T0, "behind"),
    )
    counted_later = Event(1, 50, T0, "after")
    batches = [Batch({0: (10, 12), 1: (0, 40)}, 0), Batch({0: (12, 14), 1: (40, 60)}, T0 + 1000)]
    early = replace(counted_later, offset=30)
    made = scene([late, ahead, old, far, new, counted_later, early], *batches, ends={0: 99, 1: 30, 2: 99})
    assert causes_of(spark, made) == {
        (T0, "late"): {"late": 1},
        (T0 + 6000, "ahead"): {"ahead": 1},
        (T0, "before"): {"before_checkpoint": 1},
        (T0, "behind"): {"not_reached": 2},
        (T0, "after"): {"after_final": 1},
    }


def test_an_event_that_is_late_and_ahead_of_the_checkpoint_has_one_cause(spark: SparkSession) -> None:
    early_and_ahead = Event(0, 3, T0 + 9000)
    made = scene([early_and_ahead], Batch({0: (10, 20)}, T0 + 99_000))
    assert list(causes_of(spark, made).values()) == [{"before_checkpoint": 1}]
    made = scene([replace(early_and_ahead, offset=12)], Batch({0: (10, 20)}, T0 + 99_000))
    assert list(causes_of(spark, made).values()) == [{"ahead": 1}]


def test_a_repeat_counts_in_live_only(spark: SparkSession) -> None:
    copies = [Event(0, 0, T0, id=1), Event(1, 0, T0, id=1), Event(0, 1, T0, id=2)]
    made = scene(copies, ALL, pipeline=BY_CUSTOMER)
    assert causes_of(spark, made) == {(T0, "a"): {"duplicate": 1}}
    (row,) = made.balance(spark)[1].collect()
    assert (row["live"]["events"], row["final"]["events"]) == (3, 2)


def test_of_a_repeat_whose_first_copy_was_late_both_are_named(spark: SparkSession) -> None:
    first, second = Event(0, 0, T0, id=1, arrival_ms=T0), Event(1, 0, T0, id=1, arrival_ms=T0 + 1)
    batches = [Batch({1: (0, 1)}, 0), Batch({0: (0, 1)}, T0 + 1000)]
    made = scene([first, second], *batches, pipeline=BY_CUSTOMER)
    assert causes_of(spark, made) == {(T0, "a"): {"late": 1, "duplicate": 1}}


def test_a_sliding_event_is_late_in_some_of_its_windows(spark: SparkSession) -> None:
    made = scene([Event(0, 0, T0 + 800)], Batch({0: (0, 1)}, T0 + 1250), pipeline=SLIDING)
    assert causes_of(spark, made) == {(T0, "a"): {"late": 1}, (T0 + 250, "a"): {"late": 1}}
    transformed, balance, finals = made.balance(spark)
    (total,) = drift.causes_by_slice(transformed, SLIDING).collect()
    assert (total["cause"], total["events"], total["window_events"]) == ("late", 1, 2)
    written = {ms(row["window_start"]): row for row in drift.drift_rows(balance, finals, SLIDING, "r").collect()}
    assert sorted(written) == [T0, T0 + 250]
    assert written[T0]["live"] is None
    assert written[T0]["final"]["events"] == 1
    assert (written[T0]["version"], written[T0]["run"], written[T0]["day"]) == (1, "r", at(T0).strftime("%Y%m%d"))


def test_words_of_one_line_are_separated_by_one_event(spark: SparkSession) -> None:
    made = scene([Event(0, 0, T0, "tide tide line")], Batch({0: (0, 1)}, T0 + 9000), pipeline=WORDS)
    assert causes_of(spark, made) == {(T0, "tide"): {"late": 1}, (T0, "line"): {"late": 1}}
    (total,) = drift.causes_by_slice(made.balance(spark)[0], WORDS).collect()
    assert (total["events"], total["window_events"]) == (1, 1)


def test_without_a_batch_nothing_is_reached(spark: SparkSession) -> None:
    assert causes_of(spark, scene([Event(0, 0, T0)])) == {(T0, "a"): {"not_reached": 1}}


def test_the_error_shrinks_with_age(spark: SparkSession) -> None:
    events = [Event(0, 0, T0, value=Decimal(2)), Event(0, 1, T0, value=Decimal(3)), Event(0, 2, T0, value=Decimal(5))]
    end = T0 + 1000
    moments = [end + 900, end + 5000, end + 15_001]
    batches = [Batch({0: (n, n + 1)}, 0, moment) for n, moment in enumerate(moments)]
    _, balance, _ = scene(events, *batches).balance(spark)
    (row,) = drift.totals(balance, TUMBLING).collect()
    assert (row["windows"], row["differing"], row["unexplained"]) == (1, 0, 0)
    ages = {age["age_ms"]: age for age in row["ages"] if age["measure"] == "total"}
    assert {age: found["error"] for age, found in ages.items()} == {
        1_000: 8,
        5_000: 5,
        15_000: 5,
        60_000: 0,
        300_000: 0,
    }
    assert {age: found["exact"] for age, found in ages.items()} == {
        1_000: 0,
        5_000: 0,
        15_000: 0,
        60_000: 1,
        300_000: 1,
    }
    assert {found["magnitude"] for found in ages.values()} == {10}


def test_a_row_on_one_side_only_is_unexplained_though_its_measures_are_null(spark: SparkSession) -> None:
    made = scene([Event(0, 0, T0)], Batch({0: (0, 1)}, T0 + 9000))
    transformed, _, _ = made.balance(spark)
    schema = "window_start TIMESTAMP, window_end TIMESTAMP, key STRING, total DECIMAL(28,6), mean DECIMAL(28,10)"
    more = ", events BIGINT, epoch BIGINT, batch BIGINT, as_of TIMESTAMP"
    row = (at(T0), at(T0 + 1000), "a", None, None, None, 1, 1, at(T0))
    live = spark.createDataFrame([row], schema + more)
    final = spark.createDataFrame(made.final_rows(), f"{schema}, events BIGINT")
    (found,) = drift.balance(transformed, live, final, TUMBLING).collect()
    assert found["is_unexplained"]
    assert found["unexplained"].asDict() == {"total": None, "mean": None, "events": None}


def test_a_measure_that_is_no_number_is_compared_and_not_subtracted(spark: SparkSession) -> None:
    newest = Measure(name="newest", sql="max(value)", type="STRING")
    pipeline = replace(TUMBLING, measures=(newest,), checks=(), counts=None)
    made = scene([Event(0, 0, T0), Event(0, 1, T0, "b")], ALL)
    schema = "window_start TIMESTAMP, window_end TIMESTAMP, key STRING, newest STRING"
    rows = [(at(T0), at(T0 + 1000), "a", "1.000000"), (at(T0), at(T0 + 1000), "b", "2")]
    live = spark.createDataFrame(
        [(*row, 1, 0, at(T0)) for row in rows], f"{schema}, epoch BIGINT, batch BIGINT, as_of TIMESTAMP"
    )
    balance = drift.balance(made.balance(spark)[0], live, spark.createDataFrame(rows, schema), pipeline)
    assert {row["key"]: row["unexplained"]["newest"] for row in balance.collect()} == {"a": 0, "b": None}
    (total,) = drift.totals(balance, pipeline).collect()
    assert {(age["error"], age["exact"]) for age in total["ages"]} == {(None, 2)}


# -- Any stream --

_values = st.decimals(-(10**6), 10**6, places=6)
_word_lines = st.lists(st.sampled_from(["tide", "line", "sea"]), max_size=3).map(" ".join)


@st.composite
def scenes(draw: Any, pipeline: Pipeline) -> Scene:
    names = _word_lines if pipeline is WORDS else st.sampled_from("abc")
    events, begins, ends = [], {}, {}
    for partition in range(2):
        begins[partition] = draw(st.integers(0, 3))
        ends[partition] = draw(st.integers(begins[partition], 14))
        for offset in sorted(draw(st.sets(st.integers(0, 15), max_size=12))):
            arrival_ms = T0 + draw(st.integers(0, 3000))
            events.append(
                Event(
                    partition,
                    offset,
                    arrival_ms + draw(st.integers(-3000, 500) | st.integers(4900, 5200)),
                    draw(names),
                    draw(_values),
                    draw(st.integers(0, 2)),
                    arrival_ms,
                )
            )
    batches, at_offset, watermark = [], dict(begins), 0
    for number in range(draw(st.integers(0, 4))):
        cut = {p: draw(st.integers(start, ends[p])) for p, start in at_offset.items()}
        batches.append(Batch({p: (at_offset[p], cut[p]) for p in cut}, watermark, T0 + number * 1500))
        at_offset = cut
        watermark = max(watermark, draw(st.integers(T0 - 3000, T0 + 4000)))
    names_of = sorted({slice_at(pipeline, T0 + second * 1000).name for second in range(-8, 12)})
    finals = {
        name: {p: draw(st.integers(0, 16)) for p in range(draw(st.integers(1, 2)))}
        for name in names_of
        if draw(st.integers(0, 4))
    }
    return Scene(pipeline, events, batches, finals or {names_of[0]: {}})


@pytest.mark.parametrize("pipeline", [TUMBLING, SLIDING, WORDS, BY_CUSTOMER], ids=lambda pipeline: pipeline.name)
def test_any_difference_has_its_causes_and_a_planted_error_is_found(spark: SparkSession, pipeline: Pipeline) -> None:
    # The oracle names the measures of the rolling sum and of the word count.
    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(scenes(pipeline), st.randoms(use_true_random=False))
    def judge(made: Scene, chance: Any) -> None:
        assert causes_of(spark, made) == made.causes()
        rows = made.live_rows()
        if not rows:
            return
        victim = chance.choice(rows)
        made.planted[ms(victim[0]), victim[2]] = chance.choice([1, -1])
        _, balance, _ = made.balance(spark)
        wrong = {place(row, pipeline): row["unexplained"][-1] for row in balance.where("is_unexplained").collect()}
        assert wrong == made.planted

    judge()


def test_the_slices_of_a_scene_are_those_of_the_pipeline() -> None:
    assert all(slice_named(TUMBLING, name) for name in scene([]).finals)
