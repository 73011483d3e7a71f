"""A driver that uses all parts of Spark that our jobs use, so that the archive contains their classes."""

import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from jobs import session
from jobs.settings import Settings

_RECORD = "struct<key: string, value: double, time: timestamp>"


def main(work: Path) -> None:
    """Read, parse, aggregate, join and write: as a batch, and as a stream with state."""
    settings = replace(Settings.from_env(), spark_master="local[2]", lake_root=work / "lake", shuffle_partitions=2)
    with session.opened(settings, "lesson") as spark:
        _batch(spark, work)
        _stream(spark, work)


def _batch(spark: SparkSession, work: Path) -> None:
    parsed = _parsed(spark.range(0, 1000, 1, 3).withColumn("n", F.col("id"))).persist()
    windows = _counted(parsed)
    windows.repartition("day").sortWithinPartitions("day", "key").write.partitionBy("day").parquet(f"{work}/windows")
    windows.write.format("delta").save(f"{work}/table")
    again = spark.read.format("delta").load(f"{work}/table").where("events > 0")
    rows = pa.table({"key": ["1"], "offsets": [[(0, 1)]], "at": [datetime.now(UTC)]}, schema=_TOLD)
    told = spark.createDataFrame(rows)
    joined = again.join(told, "key", "left").join(spark.read.parquet(f"{work}/windows"), ["key", "events"], "full")
    unioned = (
        joined.groupBy("key")
        .agg(F.collect_list(F.struct("events")).alias("all"))
        .unionByName(told.select("key", F.array(F.struct(F.lit(1).cast("bigint").alias("events"))).alias("all")))
    )
    unioned.withColumn("sums", F.transform("all", lambda each: each.events + 1)).orderBy("key").collect()
    windows.dropDuplicates(["key"]).toArrow()
    parsed.unpersist()


def _stream(spark: SparkSession, work: Path) -> None:
    spark.readStream.format("kafka").options(**{"kafka.bootstrap.servers": "localhost:1", "subscribe": "t"}).load()
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 100).load()
    counted = _counted(_parsed(numbers.withColumn("n", F.col("value"))).withWatermark("time", "1 second"))
    query = (
        counted.writeStream.foreachBatch(lambda batch, epoch: _write(batch, f"{work}/stream/{epoch}"))
        .outputMode("update")
        .option("checkpointLocation", f"{work}/checkpoint")
        .trigger(once=True)
        .start()
    )
    query.awaitTermination()


def _write(batch: DataFrame, folder: str) -> None:
    batch.write.parquet(folder)


def _parsed(numbers: DataFrame) -> DataFrame:
    texts = numbers.selectExpr(
        """to_json(named_struct('key', CAST(n % 7 AS STRING), 'value', n / 3, 'time', current_timestamp())) AS text"""
    )
    read = texts.withColumn("read", F.from_json("text", _RECORD)).withColumn("variant", F.expr("try_parse_json(text)"))
    return read.where("variant_get(variant, '$.key', 'string') IS NOT NULL").select("read.*")


def _counted(parsed: DataFrame) -> DataFrame:
    windows = parsed.groupBy(F.window("time", "1 minute", "10 seconds"), "key").agg(
        F.count("*").alias("events"),
        F.sum(F.col("value").cast("decimal(38, 6)")).alias("total"),
        F.max("time").alias("latest"),
    )
    return windows.selectExpr("window.start AS start", "key", "events", "total", "latest", "date(latest) AS day")


_TOLD = pa.schema({"key": pa.string(), "offsets": pa.map_(pa.int32(), pa.int64()), "at": pa.timestamp("us", "UTC")})

if __name__ == "__main__":
    main(Path(sys.argv[1]))
