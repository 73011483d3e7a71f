"""What each part of the platform asks of Kafka, derived from the definitions: the least that its user needs."""

from collections.abc import Iterator
from dataclasses import dataclass

from jobs.pipelines import INGEST, PIPELINES, SOURCES, topics
from jobs.pipelines.layout import dag_id_of
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.source import CLOCK

# A job looks up a topic, its id and its offsets before it reads or writes.
_LOOK = ("DESCRIBE",)
_READ = ("DESCRIBE", "READ")
_WRITE = ("DESCRIBE", "WRITE")
_PLAN = ("DESCRIBE", "DESCRIBE_CONFIGS")
# A start, a plan and a publish append a record to it, and learn from its stamp what time it is.
_CLOCK = (CLOCK.name,)
_APPLY = (*_PLAN, "CREATE", "ALTER", "ALTER_CONFIGS")


@dataclass(frozen=True, kw_only=True)
class Right:
    """Operations that a DAG, or the command that does the same, needs on some topics."""

    who: str
    operations: tuple[str, ...]
    topics: tuple[str, ...]


def rights() -> tuple[Right, ...]:
    """All of them. Nobody needs one on a consumer group, a transaction or the cluster."""
    sources, all_topics = tuple(SOURCES), tuple(topic.name for topic in topics())
    return (
        Right(who=dag_id_of(INGEST), operations=_READ, topics=sources),
        Right(who=dag_id_of(INGEST), operations=_WRITE, topics=_CLOCK),
        *(right for pipeline in PIPELINES.values() for right in _of_pipeline(pipeline)),
        Right(who="reset_stream", operations=_LOOK, topics=sources),
        Right(who="generate_demo_traffic", operations=_WRITE, topics=sources),
        Right(who="tideline topics plan", operations=_PLAN, topics=all_topics),
        Right(who="provision_topics", operations=_APPLY, topics=all_topics),
    )


def _of_pipeline(pipeline: Pipeline) -> Iterator[Right]:
    source, stream = (pipeline.source.name,), dag_id_of(pipeline.name)
    yield Right(who=stream, operations=_READ, topics=source)
    yield Right(who=stream, operations=_WRITE, topics=(pipeline.output, *_CLOCK))
    # Its plan takes the topic's ends; its publish sends what has become final.
    yield Right(who=pipeline.recompute_job, operations=_LOOK, topics=source)
    yield Right(who=pipeline.recompute_job, operations=_WRITE, topics=(pipeline.final_topic.name, *_CLOCK))
