"""Kafka as Spark reads and writes it."""

import json
from collections.abc import Mapping

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from jobs.broker.kafka import spark_options
from jobs.settings import KafkaSettings

_FETCH = {
    # By default 1 MiB is fetched per partition, which costs 7 % to 18 % of a drain's time.
    "kafka.max.partition.fetch.bytes": str(16 * 1024 * 1024),
    "kafka.fetch.max.bytes": str(64 * 1024 * 1024),
    "kafka.max.poll.records": "20000",
    "kafka.receive.buffer.bytes": str(1024 * 1024),
    # By default Spark asks a dead broker for offsets for a minute, although another broker leads its partitions after
    # ten seconds. With these values it asks the dead broker for 15 s, and then the new leader. It tries more often, so
    # it gives up as late as before.
    "kafka.request.timeout.ms": "15000",
    "kafka.default.api.timeout.ms": "15000",
    "fetchOffset.numRetries": "12",
}
_PRODUCE = {
    # The defaults send a request for every 16 KiB.
    "kafka.batch.size": str(256 * 1024),
    "kafka.linger.ms": "5",
}


def read(
    spark: SparkSession, kafka: KafkaSettings, topic: str, *, max_offsets: int, begins: Mapping[int, int]
) -> DataFrame:
    """A topic's committed records as a stream.

    ``begins`` has an offset for every partition, or it is empty and the stream begins at the earliest records. Spark
    uses it only if the stream has no checkpoint yet.
    """
    return (
        spark.readStream.format("kafka")
        .options(**spark_options(kafka), **_FETCH)
        .option("subscribe", topic)
        .option("startingOffsets", json.dumps({topic: dict(begins)}) if begins else "earliest")
        .option("includeHeaders", "true")
        .option("failOnDataLoss", "true")
        .option("kafka.isolation.level", "read_committed")
        .option("maxOffsetsPerTrigger", str(max_offsets))
        .load()
    )


def arrow_schema(frame: DataFrame) -> pa.Schema:
    """The columns of a frame as the lake's tables have them."""
    return to_arrow_schema(frame.schema, timezone="UTC")


def send(messages: DataFrame, kafka: KafkaSettings, topic: str) -> None:
    """Write key and value to a topic; returns when the broker has them all."""
    messages.write.format("kafka").options(**spark_options(kafka), **_PRODUCE).option("topic", topic).save()
