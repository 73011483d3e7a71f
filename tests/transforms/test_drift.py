"""The drift balance against a naive simulation of the stream: each counted or omitted event has a cause."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import slice_at, slice_named
from jobs.pipelines.window import Measure
from jobs.transforms import drift
from tests.judges.naive_stream import (
    BY_CUSTOMER,
    SLIDING,
    T0,
    TUMBLING,
    WORDS,
    Batch,
    Event,
    Scene,
    at,
    ms,
    place,
    scene,
)

pytestmark = pytest.mark.spark


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


def test_nothing_explains_what_the_stream_skipped_between_two_batches(spark: SparkSession) -> None:
    before, skipped, taken = Event(0, 3, T0, "before"), Event(0, 15, T0, "skipped"), Event(0, 25, T0, "taken")
    new = Event(1, 0, T0, "new")
    batches = [Batch({0: (10, 12)}, 0), Batch({0: (20, 30), 1: (1, 2)}, 0)]
    _, balance, _ = scene([before, skipped, taken, new], *batches).balance(spark)
    rows = {row["key"]: row for row in balance.collect()}
    assert {key for key, row in rows.items() if row["is_unexplained"]} == {"skipped", "new"}
    assert {key: row["causes"] for key, row in rows.items() if row["causes"]} == {"before": {"before_checkpoint": 1}}


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


def test_a_final_row_that_is_lost_or_made_up_is_unexplained(spark: SparkSession) -> None:
    made = scene([Event(0, 0, T0)], ALL)
    transformed, _, _ = made.balance(spark)
    names = "window_start TIMESTAMP, window_end TIMESTAMP, key STRING, total DECIMAL(28,6), mean DECIMAL(28,10)"
    schema = f"{names}, events BIGINT"
    ((start, end, _, *values),) = made.final_rows()
    more = "epoch BIGINT, batch BIGINT, as_of TIMESTAMP"
    live = spark.createDataFrame(made.live_rows(), f"{schema}, {more}")
    final = spark.createDataFrame([(start, end, "made up", *values)], schema)
    rows = drift.balance(transformed, live, final, TUMBLING).where("is_unexplained").collect()
    assert {row["key"]: row["unexplained"]["events"] for row in rows} == {"a": None, "made up": None}


def test_a_wrong_final_row_is_unexplained_though_live_and_final_have_causes_to_differ(spark: SparkSession) -> None:
    late, other = Event(0, 1, T0), Event(0, 2, T0, "b")
    made = scene([Event(0, 0, T0), late, other], Batch({0: (0, 1)}, 0), Batch({0: (1, 3)}, T0 + 1000))
    made.planted_in_final[T0, "a"] = 1
    _, balance, _ = made.balance(spark)
    rows = {row["key"]: row for row in balance.collect()}
    assert {key: row["is_unexplained"] for key, row in rows.items()} == {"a": True, "b": False}
    assert rows["a"]["causes"] == {"late": 1}
    assert rows["a"]["unexplained"].asDict() == {"total": 0, "mean": 0, "events": 1}
    (total,) = drift.totals(balance, TUMBLING).collect()
    assert total["unexplained"] == 1


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
        ends[partition] = draw(st.integers(begins[partition], 28))
        for offset in sorted(draw(st.sets(st.integers(0, 30), max_size=25))):
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
        name: {p: draw(st.integers(0, 32)) for p in range(draw(st.integers(1, 2)))}
        for name in names_of
        if draw(st.integers(0, 4))
    }
    return Scene(pipeline, events, batches, finals or {names_of[0]: {}})


@pytest.mark.parametrize("pipeline", [TUMBLING, SLIDING, WORDS, BY_CUSTOMER], ids=lambda pipeline: pipeline.name)
def test_any_difference_has_its_causes_and_a_planted_error_is_found(spark: SparkSession, pipeline: Pipeline) -> None:
    # The oracle uses the names of measures of the rolling sum and of the word count.
    @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
    @given(scenes(pipeline), st.randoms(use_true_random=False))
    def judge(made: Scene, chance: Any) -> None:
        if rows := made.live_rows():
            victim = chance.choice(rows)
            made.planted[ms(victim[0]), victim[2]] = chance.choice([1, -1])
        if rows := made.final_rows():
            victim = chance.choice(rows)
            made.planted_in_final[ms(victim[0]), victim[2]] = chance.choice([2, -2])
        found = made.balance(spark)[1].collect()
        assert {place(row, pipeline): row["causes"] for row in found if row["causes"]} == made.causes()
        wrong = {place(row, pipeline): row["unexplained"][-1] for row in found if row["is_unexplained"]}
        assert wrong == {**made.planted_in_final, **made.planted}

    judge()


def test_the_slices_of_a_scene_are_those_of_the_pipeline() -> None:
    assert all(slice_named(TUMBLING, name) for name in scene([]).finals)
