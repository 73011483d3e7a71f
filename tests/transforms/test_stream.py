"""The same plan as a stream: whatever the order and the cut into micro-batches, the newest rows equal the oracle."""

import json
import tempfile
import time
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from jobs.broker.streams import arrow_schema
from jobs.lake.columns import live_schema
from jobs.pipelines import PIPELINES
from jobs.pipelines.pipeline import Pipeline
from jobs.streaming.live import events_that_count
from jobs.transforms.aggregate import aggregate
from tests.judges import oracle
from tests.judges.oracle import Record
from tests.transforms.kafka_frame import SCHEMA, frame

pytestmark = pytest.mark.spark

NOW = int(time.time() * 1000)
# Within the watermark's delay, so a stream counts the same events as the oracle.
_ages = st.integers(0, 4000)
_values = st.decimals(-(10**6), 10**6, places=3).map(float)


def _number(age_ms: int, key: str, value: float) -> Record:
    document = json.dumps({"id": 1, "ts": NOW - age_ms, "value": value})
    return Record(arrival_ms=NOW, key=key.encode(), value=document.encode())


def _line(age_ms: int, text: str) -> Record:
    stamp = str(NOW - age_ms).encode()
    return Record(arrival_ms=NOW, value=text.encode(), headers=(("ts", stamp),))


_numbers = st.builds(_number, _ages, st.sampled_from("abc"), _values)
_lines = st.builds(_line, _ages, st.text("aAé _-Ж", max_size=9))
_broken = st.just(Record(arrival_ms=NOW, value=b"\xff"))
CASES = {"rolling_sum": _numbers, "rolling_sum_sliding": _numbers, "word_count": _lines}


def newest_rows(spark: SparkSession, pipeline: str, batches: list[list[Record]], folder: Path) -> dict[Any, Any]:
    """Run the live job's plan over one file per micro-batch, and keep the last row of each window."""
    for number, records in enumerate(batches):
        frame(spark, records).coalesce(1).write.parquet(str(folder / "in" / str(number)))
    definition = PIPELINES[pipeline]
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folder / "in" / "*"))
    found: dict[Any, Any] = {}

    def keep(updates: DataFrame, _batch: int) -> None:
        for row in updates.collect():
            start = round(row.window_start.replace(tzinfo=UTC).timestamp() * 1000)
            found[start, row[definition.keys[0]]] = {m.name: row[m.name] for m in definition.measures}

    query = (
        aggregate(events_that_count(stream, definition), definition)
        .writeStream.outputMode("update")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .foreachBatch(keep)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return found


@pytest.mark.parametrize("pipeline", CASES)
def test_newest_rows_equal_the_oracle(spark: SparkSession, pipeline: str) -> None:
    records = st.lists(st.one_of(CASES[pipeline], _broken), min_size=1, max_size=20)

    @settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(records, min_size=2, max_size=3), st.randoms(use_true_random=False))
    def judge(batches: list[list[Record]], chance: Any) -> None:
        for batch in batches:
            chance.shuffle(batch)
        events = [oracle.accept(oracle.SOURCE_OF[pipeline], record) for batch in batches for record in batch]
        with tempfile.TemporaryDirectory() as folder:
            found = newest_rows(spark, pipeline, batches, Path(folder))
        assert found == oracle.aggregate(pipeline, [event for event in events if event])

    judge()


@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=lambda pipeline: pipeline.name)
def test_the_live_table_has_the_columns_of_the_windows(spark: SparkSession, pipeline: Pipeline) -> None:
    windows = arrow_schema(aggregate(events_that_count(frame(spark, []), pipeline), pipeline))
    table = live_schema(pipeline)
    assert [(field.name, field.type) for field in windows] == [(field.name, field.type) for field in table][
        : len(windows)
    ]
    assert table.names[len(windows) :] == ["epoch", "batch", "as_of", "fingerprint", "offsets", "watermark"]
