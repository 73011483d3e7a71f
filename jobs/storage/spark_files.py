"""Parquet files that Spark writes, with the number of rows that Spark itself has counted meanwhile."""

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

from jobs.storage.folders import Folder


def write_counted(frame: DataFrame, partition: str, folder: Folder, **options: str | int) -> int:
    """Write a frame, a folder for each value of a column; how many rows that are.

    The count is made where rows are written: it is not read back from the files, so it can judge them.
    """
    counted = Observation()
    observed = frame.observe(counted, F.count(F.lit(1)).alias("rows"))
    observed.write.options(**options).partitionBy(partition).parquet(str(folder))
    return int(counted.get["rows"])
