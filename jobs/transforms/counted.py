"""Choose the accepted events that a live job counts. The stream and its account share this rule."""

from pyspark.sql import Column
from pyspark.sql import functions as F

from jobs.pipelines.pipeline import Pipeline


def is_ahead(pipeline: Pipeline) -> Column:
    """Whether an event is ahead of its arrival by more than the watermark's delay.

    Such an event is not counted. Otherwise one fast clock would move the watermark, and all other events would be late.
    """
    delay = F.expr(f"INTERVAL {pipeline.watermark_delay_seconds} seconds")
    return F.col("event_time") > F.col("arrival_time") + delay
