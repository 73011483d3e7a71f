"""Of several equal records, the first that arrived counts."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from jobs.pipelines.shipped.sources import NUMBERS
from jobs.transforms.deduplicate import first_arrivals

pytestmark = pytest.mark.spark

SAME_ID = replace(NUMBERS, identity=("id",))
SCHEMA = "id BIGINT, event_time BIGINT, arrival_time BIGINT, partition INT, offset BIGINT"
small = st.integers(0, 3)


def test_without_an_identity_nothing_is_the_same(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(1, 1, 1, 0, 0)] * 2, SCHEMA)
    assert first_arrivals(frame, NUMBERS).count() == 2


@settings(max_examples=5, deadline=None, database=None)
@given(st.lists(st.tuples(small, small, small, st.integers(0, 1)), max_size=60))
def test_the_first_arrival_stays(spark: SparkSession, rows: list[tuple[int, int, int, int]]) -> None:
    """Compare with a naive reading: sort, and keep the first of each identity and event time."""
    records = [(*row, offset) for offset, row in enumerate(rows)]
    kept: dict[tuple[int, int], tuple[int, ...]] = {}
    for record in sorted(records, key=lambda record: (record[2], record[3], record[4])):
        kept.setdefault((record[0], record[1]), record)
    frame = spark.createDataFrame(records, SCHEMA)
    assert sorted(tuple(row) for row in first_arrivals(frame, SAME_ID).collect()) == sorted(kept.values())
