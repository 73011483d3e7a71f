"""Parquet files that Spark writes, with the number of rows that Spark counts while it writes."""

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

from jobs.storage.folders import Folder


def write_counted(frame: DataFrame, partition: str, folder: Folder, **options: str | int) -> int:
    """Write a frame, one folder per value of a column, and return the number of rows.

    Spark counts the rows while it writes. The count does not come from the files, so it can be used to check them.
    """
    counted = Observation()
    observed = frame.observe(counted, F.count(F.lit(1)).alias("rows"))
    observed.write.options(**options).partitionBy(partition).parquet(str(folder))
    return int(counted.get["rows"])
