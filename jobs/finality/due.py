"""Decides which slices are over and due, and why, and which events are still needed. It reads no tables."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from jobs.lake.slices import Boundary, Header, LedgerLine, State
from jobs.pipelines.days import DAY_MS, day_of
from jobs.pipelines.layout import HOUR_MS
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import (
    CLOCK_SKEW_MS,
    Slice,
    has_events,
    over_at,
    slice_at,
    slice_named,
    slices_between,
    start_ms_of,
    why_early,
)
from jobs.pipelines.source import Source
from jobs.times import iso

# A run takes at most this many slices. Several runs fill a longer gap.
MAX_SLICES = 5000
# A run that was killed leaves its slices in one of these states. The next run takes them again.
_UNFINISHED = (State.CLOSED, State.RECOMPUTING, State.AUDITING, State.REOPENED)


@dataclass(frozen=True, kw_only=True)
class TopicEnds:
    """The topic as the plan found it. Its ends include the records of open transactions."""

    topic_id: str
    earliest: Mapping[int, int]
    ends: Mapping[int, int]

    def landed(self, ends: Mapping[int, int]) -> dict[int, int]:
        """How far each partition is landed. If ``ends`` lacks one, it counts as landed up to where `ingest` will begin.

        >>> TopicEnds(topic_id="t1", earliest={0: 0, 1: 500}, ends={0: 10, 1: 510}).landed({0: 7})
        {0: 7, 1: 500}
        """
        return {partition: ends.get(partition, first) for partition, first in self.earliest.items()}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The slices that a plan takes, whatever their state, and why. Such a plan takes no other slice.

    A plan without a request (None) takes every slice that is due.
    """

    slices: tuple[Slice, ...]
    reason: str


# With this request a plan takes no slice. It still takes the boundaries of all slices that are over.
BOUNDARIES_ONLY = Request(slices=(), reason="only boundaries are taken")


@dataclass(frozen=True, kw_only=True)
class Due:
    """A slice to be recomputed, and why. ``version`` is its version that is served now, or 0."""

    slice: Slice
    version: int
    reason: str
    boundary: Boundary
    late: int = 0


@dataclass(frozen=True, kw_only=True)
class SliceSurvey:
    """The slices that are due, and everything else that a plan finds out about slices."""

    tide_line_ms: int | None
    due: tuple[Due, ...]
    # Slices that are over and wait for ingest, each with its boundary.
    waiting: Mapping[Slice, Boundary]
    # Boundaries that this plan takes. They must be written into the ledger before anything else.
    taken: Mapping[Slice, Boundary]
    # Requested slices that are not closed, each with a sentence that says why.
    refused: Mapping[Slice, str]
    blocked: tuple[Slice, ...]
    # Slices that an older definition made final. A plan reads only some days, so there may be more of them.
    outdated: tuple[Slice, ...]
    # Slices that are published, but whose run was killed before it wrote to the topic and the ledger.
    unannounced: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """The state of tables and topic when a plan is made, as far as the plan needs it."""

    now_ms: int
    # Where the slices of the pipeline begin (`tide_line.first_event_ms`). None: there are no events and no final
    # slices.
    first_ms: int | None
    topic: TopicEnds
    landed: Mapping[int, int]
    # Headers of final slices, and newest ledger lines, by slice: for all slices of ``days``, and for other slices that
    # are requested, were left by a run, or have late events.
    headers: Mapping[str, Header]
    entries: Mapping[str, LedgerLine]
    tide_line_ms: int | None = None
    # The number of late events of each computed slice since the last plan.
    late: Mapping[str, int] = field(default_factory=dict)
    # How many of these late events had arrived in time (`LedgerLine.in_time`).
    in_time: Mapping[str, int] = field(default_factory=dict)
    # The days on which any slice may be due; None: all days. On other days all slices are final. A slice of such a day
    # is due only if it is requested, has late events, or was left by a killed run.
    days: Collection[str] | None = None
    # Final slices that a plan must look at, on whatever day they begin. A run that has not ended has planned them, or
    # an earlier plan has counted their late events without a decision.
    left: Collection[str] = ()
    # Final slices that need nothing: their newest line is final, at the version of their header, without late events.
    # Their lines are not in ``entries``.
    settled: Collection[str] = ()
    # The other final slices that the plan has looked up in the ledger. If one of them is not in ``entries``, the ledger
    # has no line about it. None stands for all slices in ``headers``.
    not_settled: Collection[str] | None = None
    # Events that happened before this time were removed; 0 if no event was removed.
    events_from_ms: int = 0


def why_removed(source: Source, events_from_ms: int) -> str:
    """The reason why a slice that has lost events can be neither computed nor compared."""
    return (
        f"events of {source.name!r} before {iso(events_from_ms)} were removed: they are kept for events_kept_days="
        f"{source.events_kept_days}"
    )


def needed_from_ms(pipeline: Pipeline, inputs: PlanInputs, surveyed: SliceSurvey, open_: Collection[str]) -> int:
    """The event time from which on events are still needed, by slices that are not final or can still be reopened.

    A slice becomes final only after `ingest` has landed all records that arrived before its end. So all events that
    arrived before the time of the tide line are landed. An event that arrives later is rejected if it is older than the
    horizon. So a slice can be reopened only if it ends less than a horizon before the tide line. ``open_``: the names
    of older slices that wait for a person or a run.

    In the example the slices of 30 days are final, and the horizon is seven days. Clocks may differ by 5 s, so the last
    slice of the 23rd day can still change.

    >>> from jobs.pipelines import PIPELINES
    >>> pipeline, topic = PIPELINES["rolling_sum"], TopicEnds(topic_id="t1", earliest={}, ends={})
    >>> empty = {"topic": topic, "landed": {}, "headers": {}, "entries": {}}
    >>> inputs = PlanInputs(now_ms=30 * DAY_MS, first_ms=0, tide_line_ms=30 * DAY_MS, days=(), **empty)
    >>> iso(needed_from_ms(pipeline, inputs, survey(pipeline, inputs), open_=()))
    '1970-01-23T23:59:00.000Z'
    >>> iso(needed_from_ms(pipeline, inputs, survey(pipeline, inputs), open_={"19700102T000000Z"}))
    '1970-01-02T00:00:00.000Z'
    """
    if inputs.first_ms is None:
        return 0
    line = inputs.first_ms if surveyed.tide_line_ms is None else surveyed.tide_line_ms
    oldest = line - pipeline.source.horizon_hours * HOUR_MS - CLOCK_SKEW_MS - pipeline.window.reach_ms
    slices = [*(due.slice for due in surveyed.due), *surveyed.waiting, *surveyed.blocked]
    starts = [slice_at(pipeline, max(0, oldest)).start_ms, *(slice_.start_ms for slice_ in slices)]
    return min([*starts, *map(start_ms_of, open_)]) - pipeline.window.look_back_ms


def over(pipeline: Pipeline, inputs: PlanInputs) -> list[Slice]:
    """Every slice that is over, on the days that may have a due slice.

    A slice of `rolling_sum` is over 65 s after its end. So at 185 s the first two slices are over.

    >>> from jobs.pipelines import PIPELINES
    >>> empty = {"topic": TopicEnds(topic_id="t1", earliest={}, ends={}), "landed": {}, "headers": {}, "entries": {}}
    >>> over(PIPELINES["rolling_sum"], PlanInputs(now_ms=185_000, first_ms=30_000, **empty))
    [Slice(start_ms=0, end_ms=60000), Slice(start_ms=60000, end_ms=120000)]
    """
    if inputs.first_ms is None:
        return []
    first = slice_at(pipeline, inputs.first_ms).start_ms
    end = inputs.now_ms - over_at(pipeline, Slice(0, 0)) - pipeline.slice_seconds * 1000 + 1
    if inputs.days is None:
        return slices_between(pipeline, first, end)
    starts = (at for at in range(first - first % DAY_MS, end, DAY_MS) if day_of(at) in inputs.days)
    spans = ((max(first, at), min(end, at + DAY_MS)) for at in starts)
    return [slice_ for from_, to in spans for slice_ in slices_between(pipeline, from_, to) if slice_.start_ms >= from_]


def survey(pipeline: Pipeline, inputs: PlanInputs, request: Request | None = None) -> SliceSurvey:
    """Find the slices that a run computes now, those that wait for ingest, and those that are refused."""
    asked = set(request.slices) if request else set()
    refused = {slice_: why for slice_ in asked if (why := _why_not(pipeline, inputs, slice_))}
    candidates = _candidates(pipeline, inputs, asked - set(refused))
    in_ledger = {slice_: boundary for slice_ in candidates if (boundary := _boundary(inputs, slice_))}
    # Every slice that is over gets its boundary, also one that the request does not name.
    boundary_now = Boundary(topic_id=inputs.topic.topic_id, ends=dict(inputs.topic.ends))
    taken = {slice_: boundary_now for slice_ in candidates if slice_ not in in_ledger}
    boundaries = {**in_ledger, **taken}
    reasons = _reasons(pipeline, inputs, candidates, request)
    waiting = {slice_: boundaries[slice_] for slice_ in reasons if not boundaries[slice_].is_reached(inputs.landed)}
    ready = [_due(inputs, slice_, reasons[slice_], boundaries[slice_]) for slice_ in reasons if slice_ not in waiting]
    if request:
        refused |= {s: f"ingest has not landed {end.missing(inputs.landed)} yet" for s, end in waiting.items()}
    return SliceSurvey(
        tide_line_ms=inputs.tide_line_ms,
        due=tuple(ready),
        waiting=waiting,
        taken=taken,
        refused=refused,
        blocked=tuple(slice_ for slice_ in candidates if _state(inputs, slice_) is State.BLOCKED),
        outdated=outdated_slices(pipeline, inputs.headers, inputs.events_from_ms),
        unannounced=_unannounced(inputs),
    )


def _candidates(pipeline: Pipeline, inputs: PlanInputs, asked: Collection[Slice]) -> list[Slice]:
    """The slices about which a plan decides, in order. They are over, and the lake still has all their events.

    They are the slices of days that may have work, those with late events, those that a run has left, and ``asked``.
    """
    recent = [slice_ for slice_ in over(pipeline, inputs) if slice_.name not in inputs.settled]
    left = (name for name in inputs.left if name not in inputs.settled)
    # A wrong clock may have made a slice final before it was over. It is computed again only when it is over.
    named = (slice_named(pipeline, name) for name in (*inputs.late, *left))
    touched = [slice_ for slice_ in named if not why_early(pipeline, slice_, inputs.now_ms)]
    found = sorted({*recent, *touched, *asked})
    return [slice_ for slice_ in found if has_events(pipeline, slice_, inputs.events_from_ms)]


def _reasons(
    pipeline: Pipeline, inputs: PlanInputs, candidates: Collection[Slice], request: Request | None
) -> dict[Slice, str]:
    """The candidates to be computed, each with its reason: it is requested, or without a request it is due."""
    if request:
        asked = set(request.slices)
        return {slice_: request.reason for slice_ in candidates if slice_ in asked}
    reasons = ((slice_, _reason(pipeline, inputs, slice_)) for slice_ in candidates)
    return {slice_: reason for slice_, reason in reasons if reason is not None}


def _due(inputs: PlanInputs, slice_: Slice, reason: str, boundary: Boundary) -> Due:
    header = inputs.headers.get(slice_.name)
    version = header.version if header else 0
    return Due(slice=slice_, version=version, reason=reason, boundary=boundary, late=_late(inputs, slice_.name))


def _unannounced(inputs: PlanInputs) -> tuple[str, ...]:
    """The published slices that have no final line of their version in the ledger yet."""
    names = inputs.headers if inputs.not_settled is None else inputs.not_settled
    return tuple(sorted(name for name in names if _is_unannounced(inputs.headers[name], inputs.entries.get(name))))


def reopens(pipeline: Pipeline, late: int, events: int) -> bool:
    """Whether this number of late events reopens a slice with this number of events.

    >>> from jobs.pipelines import PIPELINES
    >>> [reopens(PIPELINES["rolling_sum"], late, events=1_000) for late in (10, 11)]
    [False, True]
    """
    return late > pipeline.reopen_rows or late > pipeline.reopen_share * events


def _reason(pipeline: Pipeline, inputs: PlanInputs, slice_: Slice) -> str | None:
    """Return why a scheduled run takes a slice, or None if it does not."""
    header, entry = inputs.headers.get(slice_.name), inputs.entries.get(slice_.name)
    late, in_time = _late(inputs, slice_.name), in_time_of(inputs, slice_.name)
    if entry and entry.state is State.BLOCKED and entry.version > (header.version if header else 0):
        return _reason_to_try_again(pipeline, entry, late, in_time)
    if header is None:
        return "closed"
    if in_time:
        # It was made final too early: a clock was wrong, or the clocks of the brokers differ too much.
        return f"{in_time:,} missing events that had arrived in time"
    if late and reopens(pipeline, late, header.events):
        return f"{late:,} late events"
    if entry and entry.state in _UNFINISHED and entry.version > header.version:
        return f"unfinished: {entry.reason}" if not entry.reason.startswith("unfinished") else entry.reason
    return None


def _reason_to_try_again(pipeline: Pipeline, entry: LedgerLine, late: int, in_time: int) -> str | None:
    """Return why a blocked slice is tried again: a changed definition, or enough new events; None if neither.

    Without such a change it would be blocked again. With only a few new events it still waits for a person.
    """
    if (entry.fingerprint, entry.checks) != (pipeline.fingerprint, pipeline.checks_fingerprint):
        return "blocked, and its definition has changed"
    enough = in_time or (late and reopens(pipeline, late, entry.events or 0))
    return f"blocked, and {late:,} events came since" if enough else None


def _boundary(inputs: PlanInputs, slice_: Slice) -> Boundary | None:
    """Return the boundary that was taken, or None. A boundary of a topic that was re-created since is ignored."""
    entry = inputs.entries.get(slice_.name)
    boundary = entry.boundary if entry else None
    return boundary if boundary and boundary.topic_id == inputs.topic.topic_id else None


def _late(inputs: PlanInputs, name: str) -> int:
    entry = inputs.entries.get(name)
    return (entry.late if entry else 0) + inputs.late.get(name, 0)


def in_time_of(inputs: PlanInputs, name: str) -> int:
    """The number of events that arrived in time and are missing from a computed slice."""
    entry = inputs.entries.get(name)
    return (entry.in_time or 0 if entry else 0) + inputs.in_time.get(name, 0)


def _state(inputs: PlanInputs, slice_: Slice) -> State | None:
    entry = inputs.entries.get(slice_.name)
    return entry.state if entry else None


def outdated_slices(pipeline: Pipeline, headers: Mapping[str, Header], events_from_ms: int) -> tuple[Slice, ...]:
    """The slices that an older definition made final, and that can be computed anew."""
    names = sorted(name for name, header in headers.items() if header.fingerprint != pipeline.fingerprint)
    slices = (slice_named(pipeline, name) for name in names)
    return tuple(slice_ for slice_ in slices if has_events(pipeline, slice_, events_from_ms))


def _is_unannounced(header: Header, entry: LedgerLine | None) -> bool:
    return (
        entry is None
        or entry.version < header.version
        or (entry.version == header.version and entry.state is not State.FINAL)
    )


def _why_not(pipeline: Pipeline, inputs: PlanInputs, slice_: Slice) -> str | None:
    """Return why a requested slice cannot be closed now, or None if it can."""
    if why := why_early(pipeline, slice_, inputs.now_ms):
        return why
    if not has_events(pipeline, slice_, inputs.events_from_ms):
        return why_removed(pipeline.source, inputs.events_from_ms)
    if inputs.first_ms is None or slice_.end_ms <= inputs.first_ms:
        # If it became final, the pipeline would begin with it, and every slice from there on would be due.
        return "no event of it or of an earlier slice was ever landed"
    return None
