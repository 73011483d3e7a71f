r"""Words per minute: lower case, split on `\W+` (Unicode), empty tokens dropped."""

from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.shipped.sources import LINES
from jobs.pipelines.window import Check, Measure, View, Window

WORD_COUNT = Pipeline(
    name="word_count",
    description="How often each word occurs per minute; `word_count_total` is the running total of all time.",
    source=LINES,
    transform=r"""
        SELECT event_time, word
        FROM {lines} LATERAL VIEW explode(split(lower(text), r'(?U)\W+')) AS word
        WHERE word <> ''
    """,
    keys=("word",),
    window=Window.tumbling(size_ms=60_000),
    measures=(Measure(name="occurrences", sql="count(*)", type="BIGINT"),),
    checks=(Check(column="word"), Check(column="occurrences", minimum=1)),
    views=(
        View(
            name="word_count_total",
            sql="SELECT word, sum(occurrences) AS occurrences FROM word_count GROUP BY word",
        ),
    ),
    output="wordcounts",
    slice_seconds=60,
)
