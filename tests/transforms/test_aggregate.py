"""The shared plan against the oracle: any order of the events gives the same windows."""

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from jobs.pipelines import PIPELINES
from jobs.pipelines.rules import RefusedDefinitionError
from jobs.pipelines.window import Measure
from jobs.transforms.aggregate import aggregate, inputs_of_windows
from tests.judges import oracle
from tests.judges.oracle import Event, Record

pytestmark = pytest.mark.spark

T0 = 1_790_000_000_000
NOTHING = Record(arrival_ms=0, value=None)
_values = st.decimals(min_value=-(10**11), max_value=10**11, places=6)
_moments = st.integers(T0 - 5000, T0 + 5000)
_numbers = st.builds(
    lambda ms, key, value: Event(ms, {"key": key, "value": value}, NOTHING), _moments, st.sampled_from("abc"), _values
)
_words = st.text(alphabet="aAbBéÉßżŻжЖ中0_ -,.!\t'", max_size=12)
_lines = st.builds(lambda ms, text: Event(ms, {"text": text}, NOTHING), _moments, _words)
CASES = {"rolling_sum": _numbers, "rolling_sum_sliding": _numbers, "word_count": _lines}
COLUMNS = {"numbers": "key string, value decimal(18,6)", "lines": "text string"}


def frame_of(spark: SparkSession, pipeline: str, events: list[Event]) -> DataFrame:
    source = oracle.SOURCE_OF[pipeline]
    rows = [(datetime.fromtimestamp(e.event_ms / 1000, UTC), *e.columns.values()) for e in events]
    return spark.createDataFrame(rows, f"event_time timestamp, {COLUMNS[source]}")


def found(spark: SparkSession, pipeline: str, events: list[Event]) -> dict[tuple[int, str], dict[str, Any]]:
    definition = PIPELINES[pipeline]
    answer = {}
    for row in aggregate(frame_of(spark, pipeline, events), definition).collect():
        start = round(row.window_start.replace(tzinfo=UTC).timestamp() * 1000)
        at = (start, row[definition.keys[0]])
        assert at not in answer
        assert row.slice == datetime.fromtimestamp(start // 60_000 * 60, UTC).strftime("%Y%m%dT%H%M%SZ")
        answer[at] = {measure.name: row[measure.name] for measure in definition.measures}
    return answer


@pytest.mark.parametrize("pipeline", CASES)
def test_equals_the_oracle_in_any_order(spark: SparkSession, pipeline: str) -> None:
    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(CASES[pipeline], max_size=40), st.randoms(use_true_random=False))
    def judge(events: list[Event], chance: Any) -> None:
        shuffled = list(events)
        chance.shuffle(shuffled)
        assert found(spark, pipeline, shuffled) == oracle.aggregate(pipeline, events)

    judge()


@pytest.mark.parametrize("pipeline", CASES)
def test_the_rows_that_must_be_in_windows_are_those_of_the_oracle(spark: SparkSession, pipeline: str) -> None:
    """Also where one event makes many rows, or none."""

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(CASES[pipeline], max_size=40))
    def judge(events: list[Event]) -> None:
        found = inputs_of_windows(frame_of(spark, pipeline, events), PIPELINES[pipeline]).collect()
        starts = Counter(round(row.window_start.replace(tzinfo=UTC).timestamp() * 1000) for row in found)
        wanted = Counter[int]()
        for event in events:
            for start in oracle.windows_of(event.event_ms, *oracle.SHAPES[pipeline]):
                wanted[start] += len(list(oracle.contributions(pipeline, event)))
        assert starts == +wanted

    judge()


def test_words_of_many_scripts_stay_whole(spark: SparkSession) -> None:
    text = "Größe naïve слово हिन्दी don't under_score 42 😀 ΣΑΣ"
    words = found(spark, "word_count", [Event(T0, {"text": text}, NOTHING)])
    expected = ["größe", "naïve", "слово", "हिन्दी", "don", "t", "under_score", "42", "σας"]
    assert sorted(word for _, word in words) == sorted(expected)


def test_the_sum_of_the_largest_values_is_exact(spark: SparkSession) -> None:
    largest = Decimal("999999999999.999999")
    (row,) = found(spark, "rolling_sum", [Event(T0, {"key": "k", "value": largest}, NOTHING)] * 1000).values()
    assert row["total"] == largest * 1000


def test_a_double_that_the_transform_makes_is_refused(spark: SparkSession) -> None:
    loose = replace(
        PIPELINES["rolling_sum"], transform="SELECT event_time, key, CAST(value AS FLOAT) AS value FROM {numbers}"
    )
    frame = spark.createDataFrame([], f"event_time timestamp, {COLUMNS['numbers']}")
    with pytest.raises(RefusedDefinitionError, match="DOUBLE"):
        aggregate(frame, loose)


@pytest.mark.parametrize("sql", ["avg(id)", "sum(value * 1e0)", "stddev(value)"])
def test_a_double_that_a_measure_makes_is_refused(spark: SparkSession, sql: str) -> None:
    loose = replace(
        PIPELINES["rolling_sum"],
        transform="SELECT event_time, key, id, value FROM {numbers}",
        measures=(Measure(name="m", sql=sql, type="DECIMAL(28,6)"),),
        counts=None,
        checks=(),
    )
    frame = spark.createDataFrame([], f"event_time timestamp, {COLUMNS['numbers']}, id bigint")
    with pytest.raises(RefusedDefinitionError, match="DOUBLE"):
        aggregate(frame, loose)
