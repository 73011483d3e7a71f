"""The yardstick of the benchmark: plain, well-tuned Spark jobs that do the same work, without any code of Tideline.

Each job reads JSON or text from Kafka, does the same work as ours, appends to Delta and sends the rows on to Kafka.
"""

from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

_FETCH = {
    "kafka.fetch.max.bytes": str(64 * 1024 * 1024),
    "kafka.max.partition.fetch.bytes": str(16 * 1024 * 1024),
    "kafka.max.poll.records": "20000",
    "kafka.receive.buffer.bytes": str(1024 * 1024),
}
_MESSAGE_KEYS = {"rolling_sum": ("window_start", "key"), "word_count": ("window_start", "word")}


def session(jars: Path, memory: str, logging: Path) -> SparkSession:
    """A Spark session, tuned for two cores. Each setting was measured."""
    conf = {
        "spark.jars": ",".join(str(jar) for jar in sorted(jars.glob("*.jar"))),
        "spark.driver.memory": memory,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"-XX:+UseParallelGC -Dlog4j2.configurationFile={logging.as_uri()}",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        # In update mode a batch without data emits nothing.
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    }
    builder = SparkSession.builder.appName("plain").master("local[3]")
    for name, value in conf.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def drain(spark: SparkSession, workload: str, bootstrap: str, folder: Path) -> None:
    """Read all records of the workload's topics that were not read yet."""
    start = {"ingest": _ingest, "rolling_sum": _rolling_sum, "word_count": _word_count}[workload]
    for query in start(spark, bootstrap, folder):
        query.awaitTermination()


def _read(spark: SparkSession, bootstrap: str, topic: str) -> DataFrame:
    options = {
        "kafka.bootstrap.servers": bootstrap,
        "subscribe": topic,
        "startingOffsets": "earliest",
        # Only `lines` has a header that the job needs.
        "includeHeaders": str(topic == "lines"),
        **_FETCH,
    }
    return spark.readStream.format("kafka").options(**options).load()


def _numbers(records: DataFrame) -> DataFrame:
    parsed = records.withColumn(
        "json", F.from_json(F.col("value").cast("string"), "id BIGINT, ts BIGINT, value DECIMAL(18,6)")
    )
    return parsed.select(
        *("topic", "partition", "offset", F.col("timestamp").alias("arrival_time")),
        F.timestamp_millis("json.ts").alias("event_time"),
        F.col("key").cast("string").alias("key"),
        "json.id",
        "json.value",
    )


def _lines(records: DataFrame) -> DataFrame:
    stamp = F.expr("try_element_at(filter(headers, h -> h.key = 'ts'), -1).value").cast("string").cast("bigint")
    return records.select(
        *("topic", "partition", "offset", F.col("timestamp").alias("arrival_time")),
        F.coalesce(F.timestamp_millis(stamp), F.col("timestamp")).alias("event_time"),
        F.col("value").cast("string").alias("text"),
    )


def _ingest(spark: SparkSession, bootstrap: str, folder: Path) -> list[StreamingQuery]:
    return [
        parse(_read(spark, bootstrap, topic))
        .withColumn("hour", F.date_format("arrival_time", "yyyyMMddHH"))
        .writeStream.format("delta")
        .partitionBy("hour")
        .trigger(availableNow=True)
        .option("checkpointLocation", str(folder / "checkpoints" / topic))
        .start(str(folder / topic))
        for topic, parse in (("numbers", _numbers), ("lines", _lines))
    ]


def _rolling_sum(spark: SparkSession, bootstrap: str, folder: Path) -> list[StreamingQuery]:
    windows = (
        _numbers(_read(spark, bootstrap, "numbers"))
        .withWatermark("event_time", "5 seconds")
        .groupBy(F.window("event_time", "1 second"), "key")
        .agg(
            F.sum("value").cast("DECIMAL(28,6)").alias("total"),
            (F.sum("value") / F.count("*")).cast("DECIMAL(28,10)").alias("mean"),
            F.count("*").alias("events"),
        )
    )
    return [_live(windows, "rolling_sum", bootstrap, "sums", folder)]


def _word_count(spark: SparkSession, bootstrap: str, folder: Path) -> list[StreamingQuery]:
    windows = (
        _lines(_read(spark, bootstrap, "lines"))
        .withWatermark("event_time", "5 seconds")
        .select("event_time", F.explode(F.split(F.lower("text"), r"(?U)\W+")).alias("word"))
        .where("word <> ''")
        .groupBy(F.window("event_time", "1 minute"), "word")
        .agg(F.count("*").alias("occurrences"))
    )
    return [_live(windows, "word_count", bootstrap, "wordcounts", folder)]


def _live(windows: DataFrame, name: str, bootstrap: str, topic: str, folder: Path) -> StreamingQuery:
    rows = windows.select("window.start", "window.end", *windows.columns[1:]).withColumnsRenamed(
        {"start": "window_start", "end": "window_end"}
    )
    return (
        rows.writeStream.outputMode("update")
        .trigger(availableNow=True)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .foreachBatch(_append_and_send(name, bootstrap, f"plain_{topic}", folder / "table"))
        .start()
    )


def _append_and_send(name: str, bootstrap: str, topic: str, table: Path) -> Callable[[DataFrame, int], None]:
    message_key = F.to_json(F.array(*(F.col(column).cast("string") for column in _MESSAGE_KEYS[name])))

    def append_and_send(batch: DataFrame, batch_id: int) -> None:
        # The rows are written twice. Without `persist`, the aggregation would run twice.
        rows = batch.withColumn("as_of", F.current_timestamp()).persist()
        options = {"txnAppId": name, "txnVersion": str(batch_id)}
        rows.write.format("delta").mode("append").options(**options).save(str(table))
        messages = rows.select(message_key.alias("key"), F.to_json(F.struct("*")).alias("value"))
        target = {"kafka.bootstrap.servers": bootstrap, "topic": topic}
        messages.write.format("kafka").options(**target).save()
        rows.unpersist()

    return append_and_send
