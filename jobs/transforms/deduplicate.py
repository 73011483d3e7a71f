"""Events -> events without repeats, if the source has an identity."""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from jobs.pipelines.source import Source


def first_arrivals(events: DataFrame, source: Source) -> DataFrame:
    """Keep only the first arrival of events with the same identity and time. Without an identity, keep all events."""
    if not source.identity:
        return events
    same = Window.partitionBy("event_time", *(f"`{name}`" for name in source.identity))
    order = same.orderBy("arrival_time", "partition", "offset")
    return events.withColumn("_copy", F.row_number().over(order)).where("_copy = 1").drop("_copy")
