"""Reads from tables and topic the state that a plan needs: only days that can still change, however old the lake is.

Events that are landed from now on are not older than the source's horizon. So a plan opens the headers and ledger lines
of the days since the horizon. It opens an older day only if a slice of that day is not final, was requested, was left
by a run, or has late events.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from kafka import KafkaAdminClient

from jobs.broker.clock import Clock
from jobs.broker.kafka import require
from jobs.finality.due import PlanInputs, Request, TopicEnds
from jobs.finality.late import count_in_time, count_late
from jobs.finality.run.folder import slices_left
from jobs.finality.tide_line import Finals, first_event_ms, line_ms_of, whole_from_ms
from jobs.lake.events import Landed
from jobs.lake.final import FinalTable
from jobs.lake.ledger import LateCountPosition, Ledger
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines.days import day_of, days_between, incomplete_days, settled_before_ms
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import day_of_slice
from jobs.pipelines.source import Source


@dataclass(frozen=True, kw_only=True)
class PlanSnapshot:
    """The state of tables and topic, all of it read once."""

    inputs: PlanInputs
    landed: Landed | None
    # How far late events are counted now.
    counted: LateCountPosition | None = None
    # How far the last plan had counted late events.
    counted_before: LateCountPosition | None = None


def read_inputs(
    lake: PipelineLake,
    client: KafkaAdminClient,
    final: FinalTable | None,
    ledger: Ledger | None,
    request: Request | None,
    clock: Clock,
) -> PlanSnapshot:
    """Read everything that decides which slices a run takes."""
    # The clock is read before the topic. So if a slice is over, all its events that arrived in time lie before the
    # topic's ends.
    now_ms, finals = clock(), Finals.of(final)
    pipeline, source = lake.pipeline, lake.pipeline.source
    topic, landed = topic_of(client, source), lake.events()
    ends = landed_ends(landed, source, topic)
    asked = [slice_.name for slice_ in request.slices] if request else []
    last = ledger.late_count_position() if ledger else None
    left = slices_left(lake) | set(last.undecided if last else ())
    inputs = _inputs(pipeline, now_ms, topic, landed, ends, finals, {*asked, *left})
    if ledger is None:
        return PlanSnapshot(inputs=inputs, landed=landed)
    inputs = _with_entries(pipeline, replace(inputs, left=left & inputs.headers.keys()), ledger, set(asked))
    # If nothing of this topic is landed, there are no new late events. Landed events are then of an earlier topic with
    # the same name.
    if landed is None or not ends:
        return PlanSnapshot(inputs=inputs, landed=landed)
    inputs, counted = count_late(pipeline, landed, last, inputs, ends, finals.newest(), finals.headers)
    if missing := [name for name in inputs.late if name not in inputs.entries]:
        inputs = replace(inputs, entries={**inputs.entries, **ledger.newest(missing)})
    inputs = count_in_time(pipeline, landed, inputs, last)
    return PlanSnapshot(inputs=inputs, landed=landed, counted=counted, counted_before=last)


def topic_of(client: KafkaAdminClient, source: Source) -> TopicEnds:
    """The source's topic as it is now."""
    found = require(client, [source.name])[source.name]
    return TopicEnds(topic_id=found.topic_id, earliest=found.earliest, ends=found.latest)


def landed_ends(landed: Landed | None, source: Source, topic: TopicEnds) -> dict[int, int]:
    """How far the topic with this id is landed. An earlier topic of the same name does not count."""
    return landed.ends(source.name, topic.topic_id) if landed else {}


def _inputs(
    pipeline: Pipeline,
    now_ms: int,
    topic: TopicEnds,
    landed: Landed | None,
    ends: Mapping[int, int],
    finals: Finals,
    named: Iterable[str],
) -> PlanInputs:
    """Read the final table for the relevant days, including those on which ``named`` slices begin."""
    first_ms, recent_ms = first_event_ms(pipeline, landed, finals), settled_before_ms(pipeline, now_ms)
    days = set(days_between(recent_ms, now_ms))
    if first_ms is not None:
        begin_ms = max(first_ms, whole_from_ms(pipeline, landed))
        days |= set(incomplete_days(pipeline, begin_ms, now_ms, finals.by_day))
        # On the day up to which events were removed, the number of final slices does not show which ones are final. So
        # that day is always read. Example: events before 06:00 were removed, so 1,080 slices of a minute can become
        # final. If 1,080 slices of the day are final, one of them may lie before 06:00, and one after 06:00 may be
        # missing.
        days |= {day_of(begin_ms)} if begin_ms > first_ms else set()
    more = finals.changed_since(recent_ms) | {day_of_slice(name) for name in named}
    return PlanInputs(
        now_ms=now_ms,
        first_ms=first_ms,
        events_from_ms=landed.events_from_ms if landed else 0,
        topic=topic,
        landed=topic.landed(ends),
        headers=finals.headers(days | more),
        entries={},
        tide_line_ms=line_ms_of(pipeline, first_ms, finals, landed),
        days=days,
    )


def _with_entries(pipeline: Pipeline, inputs: PlanInputs, ledger: Ledger, asked: Collection[str]) -> PlanInputs:
    """Add the newest ledger lines of the relevant slices, except of settled slices, whose names are enough.

    The lines of slices that are ``asked`` for are always added, so such a slice does not count as settled.
    """
    recent_ms, days, wanted = settled_before_ms(pipeline, inputs.now_ms), set(inputs.days or ()), {*asked, *inputs.left}
    looked_up = [
        name
        for name, header in inputs.headers.items()
        if day_of_slice(name) in days or name in wanted or header.as_of_ms >= recent_ms
    ]
    versions = {name: inputs.headers[name].version for name in looked_up if name not in asked}
    entries, settled = ledger.unsettled(days | {day_of_slice(name) for name in (*looked_up, *asked)}, versions)
    not_settled = tuple(name for name in looked_up if name not in settled)
    return replace(inputs, entries=entries, settled=settled, not_settled=not_settled)
