"""Slices: aligned intervals of event time, the unit of recompute. A window belongs to the slice in which it begins."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache

from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.rules import RefusedDefinitionError

# The names of slices, as Python and DuckDB write them, and as Spark does.
NAME_FORMAT = "%Y%m%dT%H%M%SZ"
SPARK_NAME_FORMAT = "yyyyMMdd'T'HHmmss'Z'"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# One broker gives the time, but the leader of each partition stamps arrivals. Their clocks may differ by this much.
CLOCK_SKEW_MS = 5_000


@dataclass(frozen=True, order=True)
class Slice:
    """A stretch [start, end) of event time, in milliseconds since 1970.

    >>> Slice(60_000, 120_000).name
    '19700101T000100Z'
    """

    start_ms: int
    end_ms: int

    @cached_property
    def name(self) -> str:
        """Its start as text, which sorts by time and is safe in a path."""
        days, seconds = divmod(self.start_ms // 1000, 86_400)
        return f"{_day(days)}T{seconds // 3600:02}{seconds // 60 % 60:02}{seconds % 60:02}Z"

    @property
    def start(self) -> datetime:
        """Its start as a time."""
        return _EPOCH + timedelta(milliseconds=self.start_ms)

    @property
    def end(self) -> datetime:
        """Its end as a time."""
        return _EPOCH + timedelta(milliseconds=self.end_ms)


@lru_cache(maxsize=64)
def _day(days: int) -> str:
    # A plan asks for the names of thousands of slices.
    return (_EPOCH + timedelta(days=days)).strftime("%Y%m%d")


def slice_at(pipeline: Pipeline, time_ms: int) -> Slice:
    """The slice that contains a moment.

    >>> from jobs.pipelines import PIPELINES
    >>> slice_at(PIPELINES["rolling_sum"], start_ms_of("20260131T120059Z")).name
    '20260131T120000Z'
    """
    length = pipeline.slice_seconds * 1000
    start = time_ms - time_ms % length
    return Slice(start, start + length)


def slices_between(pipeline: Pipeline, from_ms: int, to_ms: int) -> list[Slice]:
    """The slices that overlap [from, to), in order.

    >>> from jobs.pipelines import PIPELINES
    >>> from_ms, to_ms = start_ms_of("20260131T120059Z"), start_ms_of("20260131T120200Z")
    >>> [slice_.name for slice_ in slices_between(PIPELINES["rolling_sum"], from_ms, to_ms)]
    ['20260131T120000Z', '20260131T120100Z']
    """
    length = pipeline.slice_seconds * 1000
    first = from_ms - from_ms % length
    return [Slice(start, start + length) for start in range(first, to_ms, length)] if from_ms < to_ms else []


def start_ms_of(name: str) -> int:
    """The start of the slice with this name. The length of the slice does not matter.

    >>> start_ms_of("19700101T000100Z")
    60000
    """
    try:
        start = datetime.strptime(name, NAME_FORMAT).replace(tzinfo=UTC)
    except ValueError as error:
        raise RefusedDefinitionError(
            f"{name!r} is no slice: write the begin of a slice, e.g. 20260131T120000Z"
        ) from error
    return round(start.timestamp() * 1000)


def day_of_slice(name: str) -> str:
    """The day on which a slice begins, as part of its name.

    >>> day_of_slice("20260131T120000Z")
    '20260131'
    """
    return name[:8]


def slice_named(pipeline: Pipeline, name: str) -> Slice:
    """The slice with this name. A name that is no slice of the pipeline is refused."""
    found = slice_at(pipeline, start_ms_of(name))
    if found.name != name:
        raise RefusedDefinitionError(
            f"{name!r} is no slice of {pipeline.name!r}, whose slices are {pipeline.slice_seconds} s long: this "
            f"time is in slice {found.name}"
        )
    return found


def adjacent_groups(slices: Iterable[Slice]) -> list[tuple[Slice, ...]]:
    """The slices in order, with adjacent slices grouped together.

    >>> groups = adjacent_groups([Slice(0, 10), Slice(20, 30), Slice(10, 20), Slice(40, 50)])
    >>> [(group[0].start_ms, group[-1].end_ms) for group in groups]
    [(0, 30), (40, 50)]
    """
    groups: list[list[Slice]] = []
    for slice_ in sorted(set(slices)):
        if groups and groups[-1][-1].end_ms == slice_.start_ms:
            groups[-1].append(slice_)
        else:
            groups.append([slice_])
    return [tuple(group) for group in groups]


def event_ranges(pipeline: Pipeline, slices: Iterable[Slice]) -> list[tuple[int, int]]:
    """The ranges [from, to) of event time from which some slices are computed. Adjacent slices share a range.

    >>> from jobs.pipelines import PIPELINES
    >>> event_ranges(PIPELINES["rolling_sum_sliding"], [Slice(0, 60_000), Slice(60_000, 120_000)])
    [(0, 120750)]
    """
    window = pipeline.window
    groups = adjacent_groups(slices)
    return [(group[0].start_ms - window.look_back_ms, group[-1].end_ms + window.reach_ms) for group in groups]


def over_at(pipeline: Pipeline, slice_: Slice) -> int:
    """The time at which a slice is over: every event that arrives for it from then on is too late.

    Both pipelines of the example allow 60 s of lateness, and 5 s are added for clocks that differ. The sliding windows
    of the second pipeline reach 750 ms past the end of their slice.

    >>> from jobs.pipelines import PIPELINES
    >>> over_at(PIPELINES["rolling_sum"], Slice(0, 60_000))
    125000
    >>> over_at(PIPELINES["rolling_sum_sliding"], Slice(0, 60_000))
    125750
    """
    return slice_.end_ms + pipeline.window.reach_ms + pipeline.allowed_lateness_seconds * 1000 + CLOCK_SKEW_MS


def why_early(pipeline: Pipeline, slice_: Slice, now_ms: int) -> str | None:
    """The reason why a slice is not over at a moment of the broker's clock, or none if it is over.

    >>> from jobs.pipelines import PIPELINES
    >>> why_early(PIPELINES["rolling_sum"], Slice(0, 60_000), now_ms=95_000)
    'it is not over: events for it are in time for 30 s more'
    >>> why_early(PIPELINES["rolling_sum"], Slice(0, 60_000), now_ms=125_000) is None
    True
    """
    wait_ms = over_at(pipeline, slice_) - now_ms
    return f"it is not over: events for it are in time for {wait_ms / 1000:.0f} s more" if wait_ms > 0 else None


def is_in_time(pipeline: Pipeline, slice_: Slice, arrival_ms: int) -> bool:
    """Whether an event of a slice arrived in time, by its broker's stamp.

    The 5 s for clocks that differ are left out here. In the example the slice ends at 60 s, and 60 s of lateness are
    allowed. So an event is in time if it arrives before 120 s.

    >>> from jobs.pipelines import PIPELINES
    >>> [is_in_time(PIPELINES["rolling_sum"], Slice(0, 60_000), arrival_ms) for arrival_ms in (119_999, 120_000)]
    [True, False]
    """
    return arrival_ms < over_at(pipeline, slice_) - CLOCK_SKEW_MS


def has_events(pipeline: Pipeline, slice_: Slice, events_from_ms: int) -> bool:
    """Whether the lake still has all events that a slice is computed from.

    Events before ``events_from_ms`` were removed; 0 if no event was removed.

    >>> from jobs.pipelines import PIPELINES
    >>> [has_events(PIPELINES["rolling_sum"], Slice(60_000, 120_000), from_ms) for from_ms in (0, 60_000, 60_001)]
    [True, True, False]
    """
    return slice_.start_ms - pipeline.window.look_back_ms >= events_from_ms or not events_from_ms


def first_whole(pipeline: Pipeline, first_ms: int, events_from_ms: int) -> Slice:
    """The first slice that still has all its events, if the first event of the lake happened at ``first_ms``.

    >>> from jobs.pipelines import PIPELINES
    >>> first_whole(PIPELINES["rolling_sum"], first_ms=90_000, events_from_ms=0)
    Slice(start_ms=60000, end_ms=120000)
    >>> first_whole(PIPELINES["rolling_sum"], first_ms=90_000, events_from_ms=90_000)
    Slice(start_ms=120000, end_ms=180000)
    """
    first = slice_at(pipeline, first_ms)
    if has_events(pipeline, first, events_from_ms):
        return first
    return slice_at(pipeline, events_from_ms + pipeline.window.look_back_ms + pipeline.slice_seconds * 1000 - 1)
