"""Windows -> the messages of an output topic."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from jobs.pipelines.pipeline import Pipeline

_ISO_UTC = "yyyy-MM-dd'T'HH:mm:ss.SSS'Z'"


def messages(windows: DataFrame, pipeline: Pipeline) -> DataFrame:
    """Key and value as JSON. The key is the array of window_start and keys, so compaction keeps one message per window.

    Args:
        windows: window_start, window_end, keys, measures, finality, version and as_of.
        pipeline: the pipeline of the windows.
    """
    columns = ("window_start", "window_end", *pipeline.value_columns, "finality", "version", "as_of")
    body = F.to_json(F.struct(*columns), {"timestampFormat": _ISO_UTC})
    start = F.date_format("window_start", _ISO_UTC)
    key = F.concat(
        F.lit("["),
        F.concat_ws(",", _json(start), *(_json(F.col(f"`{name}`")) for name in pipeline.keys)),
        F.lit("]"),
    )
    return windows.select(key.alias("key"), body.alias("value"))


def _json(value: Column) -> Column:
    """One value as JSON, such as `"k1"`.

    Spark's `to_json` cannot write a value by itself. So it writes an array with this value, `["k1"]`, and the brackets
    are cut off.
    """
    array = F.to_json(F.array(value), {"timestampFormat": _ISO_UTC})
    return F.substring(array, F.lit(2), F.length(array) - 2)
