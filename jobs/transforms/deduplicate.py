"""Events -> events without repeats, where the source says what makes two records the same."""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from jobs.pipelines.source import Source


def first_arrivals(events: DataFrame, source: Source) -> DataFrame:
    """Of events with the same identity and time the one that arrived first; all of them where nothing is the same."""
    if not source.identity:
        return events
    same = Window.partitionBy("event_time", *(f"`{name}`" for name in source.identity))
    order = same.orderBy("arrival_time", "partition", "offset")
    return events.withColumn("_copy", F.row_number().over(order)).where("_copy = 1").drop("_copy")
