"""Days of slices: which days are complete, and up to where every slice is final.

Headers and ledger lines lie in files by day (the first eight characters of a slice's name). The log of the final table
alone shows how many slices of each day are final. So a plan opens the files of few days, however old the lake is.
"""

from collections.abc import Callable, Collection, Mapping

from jobs.pipelines.layout import HOUR_MS
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import Slice, day_of_slice, slice_at

DAY_MS = 24 * HOUR_MS
# Added to the source's horizon: clocks may differ, and records are landed a little after they arrive.
_MORE_HOURS = 24


def day_of(time_ms: int) -> str:
    """The day of a moment.

    >>> day_of(1_800_000_000_000)
    '20270115'
    """
    return day_of_slice(Slice(time_ms, time_ms).name)


def days_between(from_ms: int, to_ms: int) -> list[str]:
    """The days from one moment to another, both included.

    >>> days_between(0, DAY_MS)
    ['19700101', '19700102']
    """
    return [day_of(at) for at in range(from_ms - from_ms % DAY_MS, to_ms + 1, DAY_MS)]


def settled_before_ms(pipeline: Pipeline, now_ms: int) -> int:
    """No event that arrives from now on happened before this time: `ingest` rejects events older than the horizon.

    The horizon of `numbers` is seven days, and a day is added. So only slices of the last eight days can get events.

    >>> from jobs.pipelines import PIPELINES
    >>> day_of(settled_before_ms(PIPELINES["rolling_sum"], now_ms=30 * DAY_MS))
    '19700123'
    """
    return max(0, now_ms - (pipeline.source.horizon_hours + _MORE_HOURS) * HOUR_MS)


def incomplete_days(pipeline: Pipeline, first_ms: int, now_ms: int, final: Mapping[str, int]) -> list[str]:
    """The days since the first event that have a slice which is not final yet.

    ``final`` maps a day to the number of its final slices. In the example a slice is a minute, and the first event
    comes at 23:00. So the first day has 60 slices, and the second one 1440.

    >>> from jobs.pipelines import PIPELINES
    >>> first_ms, now_ms = 23 * HOUR_MS, 50 * HOUR_MS
    >>> incomplete_days(PIPELINES["rolling_sum"], first_ms, now_ms, final={"19700101": 60, "19700102": 1439})
    ['19700102', '19700103']
    """
    first = slice_at(pipeline, first_ms).start_ms
    starts = range(first - first % DAY_MS, now_ms + 1, DAY_MS)
    return [
        day_of(at) for at in starts if final.get(day_of(at), 0) < _begin_between(pipeline, max(first, at), at + DAY_MS)
    ]


def tide_line(
    pipeline: Pipeline, first_ms: int | None, final: Mapping[str, int], names: Callable[[str], Collection[str]]
) -> int | None:
    """The end of the unbroken row of final slices that begins with the first slice; None if the first is not final.

    ``final`` maps a day to the number of its final slices. ``names`` returns the names of a day's final slices. It is
    called for two days at most: the day of the first slice, and the first day that is not complete.

    In the example the slices of the minutes 0 and 2 are final, and the slice of minute 1 is not.

    >>> from jobs.pipelines import PIPELINES
    >>> minutes_0_and_2 = ["19700101T000000Z", "19700101T000200Z"]
    >>> tide_line(PIPELINES["rolling_sum"], 0, {"19700101": 2}, lambda day: minutes_0_and_2)
    60000
    """
    if first_ms is None:
        return None
    tide_line_ms = first = slice_at(pipeline, first_ms).start_ms
    while (there := final.get(day := day_of(tide_line_ms))) is not None:
        midnight = tide_line_ms - tide_line_ms % DAY_MS
        if there == _begin_between(pipeline, midnight, midnight + DAY_MS):
            tide_line_ms += _begin_between(pipeline, tide_line_ms, midnight + DAY_MS) * pipeline.slice_seconds * 1000
            continue
        in_day = names(day)
        while (slice_ := slice_at(pipeline, tide_line_ms)).name in in_day and day_of_slice(slice_.name) == day:
            tide_line_ms = slice_.end_ms
        if day_of(tide_line_ms) == day:
            break
    return tide_line_ms if tide_line_ms > first else None


def _begin_between(pipeline: Pipeline, from_ms: int, to_ms: int) -> int:
    """How many slices begin in [from, to).

    >>> from jobs.pipelines import PIPELINES
    >>> _begin_between(PIPELINES["rolling_sum"], 0, 60_000), _begin_between(PIPELINES["rolling_sum"], 1, 60_001)
    (1, 1)
    """
    length = pipeline.slice_seconds * 1000
    return -(-to_ms // length) - -(-from_ms // length)
