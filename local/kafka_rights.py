"""The rights on Kafka that each part of the platform needs at least, derived from the definitions."""

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
# A start, a plan, an audit, a publish and a roll-back append a record to this topic, and read the time from its stamp.
_CLOCK = (CLOCK.name,)
_APPLY = (*_PLAN, "CREATE", "ALTER", "ALTER_CONFIGS")


@dataclass(frozen=True, kw_only=True)
class Right:
    """Operations that a DAG, or the command that does the same, needs on some topics."""

    who: str
    operations: tuple[str, ...]
    topics: tuple[str, ...]


def rights() -> tuple[Right, ...]:
    """All rights. No part needs a right on a consumer group, a transaction or the cluster."""
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
    # The plan reads the topic's end offsets; the publish sends the rows that became final. The audit reads the clock.
    yield Right(who=pipeline.recompute_job, operations=_LOOK, topics=source)
    yield Right(who=pipeline.recompute_job, operations=_WRITE, topics=(pipeline.final_topic.name, *_CLOCK))
