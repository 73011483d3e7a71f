"""The registry: every source, every pipeline, every streaming job. A new pipeline is one file and one line here."""

from typing import TypeVar

from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.rules import RefusedDefinitionError
from jobs.pipelines.shipped.rolling_sum import ROLLING_SUM, ROLLING_SUM_SLIDING
from jobs.pipelines.shipped.sources import CLICKS, LINES, NUMBERS, ORDERS, PAYMENTS, RAW_DATA
from jobs.pipelines.shipped.word_count import WORD_COUNT
from jobs.pipelines.source import CLOCK, Source, Topic
from jobs.pipelines.window import WindowKind

INGEST = "ingest"


_Definition = TypeVar("_Definition", Source, Pipeline)


def _by_name(*definitions: _Definition) -> dict[str, _Definition]:
    registry: dict[str, _Definition] = {}
    for definition in definitions:
        if definition.name in registry or definition.name == INGEST:
            raise RefusedDefinitionError(f"the name {definition.name!r} is taken: rename one of the two")
        registry[definition.name] = definition
    return registry


def _that_can_run(*definitions: Pipeline) -> dict[str, Pipeline]:
    """The pipelines by name. A pipeline with session windows is refused.

    No live job can compute such windows yet, so the DAG of the pipeline's stream would always fail.
    """
    for definition in definitions:
        if definition.window.kind is WindowKind.SESSION:
            raise RefusedDefinitionError(
                f"pipeline {definition.name!r} has session windows, which no live job can compute yet: use "
                "Window.tumbling or Window.sliding, or leave it out of PIPELINES"
            )
    return _by_name(*definitions)


SOURCES = _by_name(NUMBERS, LINES, CLICKS, ORDERS, PAYMENTS, RAW_DATA)
PIPELINES = _that_can_run(ROLLING_SUM, ROLLING_SUM_SLIDING, WORD_COUNT)
STREAMS = (INGEST, *PIPELINES)


def topics() -> tuple[Topic, ...]:
    """Every topic that the platform reads or writes, in its wanted state."""
    wanted = [source.topic for source in SOURCES.values()]
    wanted += [topic for pipeline in PIPELINES.values() for topic in (pipeline.topic, pipeline.final_topic)]
    wanted.append(CLOCK)
    if len({topic.name for topic in wanted}) < len(wanted):
        raise RefusedDefinitionError(f"a topic is named twice in {[topic.name for topic in wanted]}: rename one")
    return tuple(wanted)
