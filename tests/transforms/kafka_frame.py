"""Records as a frame with the columns of Spark's Kafka reader."""

from datetime import UTC, datetime

from pyspark.sql import DataFrame, SparkSession

from tests.judges.oracle import Record

SCHEMA = (
    "topic string, partition int, offset bigint, timestamp timestamp, key binary, value binary, "
    "headers array<struct<key:string,value:binary>>"
)


def frame(spark: SparkSession, records: list[Record]) -> DataFrame:
    """The records, whose offsets are their places in the list."""
    rows = [
        ("t", r.partition, n, datetime.fromtimestamp(r.arrival_ms / 1000, UTC), r.key, r.value, list(r.headers) or None)
        for n, r in enumerate(records)
    ]
    return spark.createDataFrame(rows, SCHEMA)
