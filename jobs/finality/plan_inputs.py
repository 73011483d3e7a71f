"""Reads from tables and topic the state that a plan needs: only days that can still change, however old the lake is.

Events that are landed from now on are not older than the source's horizon. So a plan opens headers and ledger lines of
the days since then. It opens an older day only if a slice there is not final, was requested, was left by a run, or has
late events.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from kafka import KafkaAdminClient

from jobs.broker.clock import Clock
from jobs.broker.kafka import require
from jobs.finality.due import PlanInputs, Request, Topic
from jobs.finality.late import count_late, tell_apart
from jobs.finality.run.folder import slices_left
from jobs.lake.events import Landed
from jobs.lake.final import FinalTable
from jobs.lake.ledger import LateCountPosition, Ledger
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.slices import Header
from jobs.pipelines.days import day_of, days_between, incomplete_days, settled_before_ms, tide_line
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import first_whole, slice_named
from jobs.pipelines.source import Source


@dataclass(frozen=True, kw_only=True)
class PlanSnapshot:
    """The state of tables and topic, all of it read once."""

    inputs: PlanInputs
    landed: Landed | None
    ends: Mapping[int, int]
    # How far late events are counted now, and how far the plan before had counted them.
    counted: LateCountPosition | None = None
    counted_before: LateCountPosition | None = None


@dataclass(frozen=True, kw_only=True)
class _Finals:
    """The final table, if anything was ever published, and how many slices of each day are final."""

    table: FinalTable | None
    by_day: Mapping[str, int]

    @classmethod
    def of(cls, table: FinalTable | None) -> Self:
        return cls(table=table, by_day=table.slices_by_day() if table else {})

    def headers(self, days: Collection[str]) -> dict[str, Header]:
        return self.table.headers(self.by_day.keys() & days) if self.table else {}

    def changed_since(self, time_ms: int) -> set[str]:
        return self.table.days_changed_since(time_ms) if self.table else set()

    def first(self) -> str | None:
        """The name of the first final slice."""
        return min(self.headers([min(self.by_day)])) if self.by_day else None

    def newest(self) -> str | None:
        """The name of the last final slice."""
        return max(self.headers([max(self.by_day)])) if self.by_day else None


def read_inputs(
    lake: PipelineLake,
    client: KafkaAdminClient,
    final: FinalTable | None,
    ledger: Ledger | None,
    request: Request | None,
    clock: Clock,
) -> PlanSnapshot:
    """Read everything that decides which slices a run takes."""
    # The clock is read before the topic. So the topic's ends cover all events in time of a slice that is over.
    now_ms, finals = clock(), _Finals.of(final)
    pipeline, source = lake.pipeline, lake.pipeline.source
    topic, landed = topic_of(client, source), lake.events()
    ends = landed_ends(landed, source, topic)
    asked = [slice_.name for slice_ in request.slices] if request else []
    last = ledger.counted() if ledger else None
    left = slices_left(lake) | set(last.undecided if last else ())
    inputs = _inputs(pipeline, now_ms, topic, landed, ends, finals, {*asked, *left})
    if ledger is None:
        return PlanSnapshot(inputs=inputs, landed=landed, ends=ends)
    inputs = _with_entries(pipeline, replace(inputs, left=left & inputs.headers.keys()), ledger, set(asked))
    # A topic without landed records has no late events. Any landed events are those of an earlier topic.
    if landed is None or not ends:
        return PlanSnapshot(inputs=inputs, landed=landed, ends=ends)
    inputs, counted = count_late(pipeline, landed, last, inputs, ends, finals.newest(), finals.headers)
    if missing := [name for name in inputs.late if name not in inputs.entries]:
        inputs = replace(inputs, entries={**inputs.entries, **ledger.newest(missing)})
    inputs = tell_apart(pipeline, landed, inputs, last)
    return PlanSnapshot(inputs=inputs, landed=landed, ends=ends, counted=counted, counted_before=last)


def line_of(pipeline: Pipeline, final: FinalTable | None, landed: Landed | None) -> tuple[int | None, int | None]:
    """Return where the slices of a pipeline begin, and its tide line. Each is None if there is none."""
    finals = _Finals.of(final)
    first_ms = _first_ms(pipeline, landed, finals)
    return first_ms, _line_ms(pipeline, first_ms, finals, landed)


def whole_from_ms(pipeline: Pipeline, landed: Landed | None) -> int:
    """The begin of the first slice that has lost no event; 0 if no event was ever removed."""
    from_ms = landed.from_ms if landed else 0
    return first_whole(pipeline, from_ms, from_ms).start_ms if from_ms else 0


def topic_of(client: KafkaAdminClient, source: Source) -> Topic:
    """The source's topic as it is now."""
    found = require(client, [source.name])[source.name]
    return Topic(topic_id=found.topic_id, earliest=found.earliest, ends=found.latest)


def landed_ends(landed: Landed | None, source: Source, topic: Topic) -> dict[int, int]:
    """How far the topic with this id is landed. An earlier topic of the same name does not count."""
    return landed.ends(source.name, topic.topic_id) if landed else {}


def _inputs(
    pipeline: Pipeline,
    now_ms: int,
    topic: Topic,
    landed: Landed | None,
    ends: Mapping[int, int],
    finals: _Finals,
    named: Iterable[str],
) -> PlanInputs:
    """Read the final table for the relevant days, including those on which ``named`` slices begin."""
    first_ms, recent_ms = _first_ms(pipeline, landed, finals), settled_before_ms(pipeline, now_ms)
    days = set(days_between(recent_ms, now_ms))
    if first_ms is not None:
        begin_ms = max(first_ms, whole_from_ms(pipeline, landed))
        days |= set(incomplete_days(pipeline, begin_ms, now_ms, finals.by_day))
        # Some final slices of that day may have lost events since. So the day's count of final slices does not show
        # whether all others are final.
        days |= {day_of(begin_ms)} if begin_ms > first_ms else set()
    more = finals.changed_since(recent_ms) | {name[:8] for name in named}
    return PlanInputs(
        now_ms=now_ms,
        first_ms=first_ms,
        events_from_ms=landed.from_ms if landed else 0,
        topic=topic,
        landed=topic.landed(ends),
        headers=finals.headers(days | more),
        entries={},
        line_ms=_line_ms(pipeline, first_ms, finals, landed),
        days=days,
    )


def _first_ms(pipeline: Pipeline, landed: Landed | None, finals: _Finals) -> int | None:
    event_ms, first = landed.first_ms() if landed else None, finals.first()
    if landed and event_ms is not None:
        event_ms = max(event_ms, first_whole(pipeline, event_ms, landed.from_ms).start_ms)
    starts = [event_ms] if event_ms is not None else []
    return min([*starts, slice_named(pipeline, first).start_ms] if first else starts, default=None)


def _line_ms(pipeline: Pipeline, first_ms: int | None, finals: _Finals, landed: Landed | None) -> int | None:
    """The tide line. It passes over slices that cannot become final any more, because their events were removed."""
    line_ms, whole_ms = _line_from(pipeline, first_ms, finals), whole_from_ms(pipeline, landed)
    if first_ms is None or whole_ms <= (first_ms if line_ms is None else line_ms):
        return line_ms
    later_ms = _line_from(pipeline, whole_ms, finals)
    return whole_ms if later_ms is None else later_ms


def _line_from(pipeline: Pipeline, first_ms: int | None, finals: _Finals) -> int | None:
    return tide_line(pipeline, first_ms, finals.by_day, lambda day: finals.headers([day]))


def _with_entries(pipeline: Pipeline, inputs: PlanInputs, ledger: Ledger, asked: Collection[str]) -> PlanInputs:
    """Add the newest ledger lines of the relevant slices."""
    recent_ms, days, wanted = settled_before_ms(pipeline, inputs.now_ms), set(inputs.days or ()), {*asked, *inputs.left}
    told = [n for n, h in inputs.headers.items() if n[:8] in days or n in wanted or h.as_of_ms >= recent_ms]
    versions = {name: inputs.headers[name].version for name in told if name not in asked}
    entries, settled = ledger.unsettled(days | {name[:8] for name in (*told, *asked)}, versions)
    rest = tuple(name for name in told if name not in settled)
    return replace(inputs, entries=entries, settled=settled, with_entries=rest)
