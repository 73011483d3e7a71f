"""Counts events that came after a slice was computed, and how many of them had arrived before it was over.

With a right clock, no final slice misses an event that arrived before it was over. If one does, it is computed again.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from jobs.finality.due import PlanInputs, TopicEnds
from jobs.lake.events import Landed
from jobs.lake.ledger import LateCountPosition
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.slices import ROLLED_BACK, Header, LedgerLine, State, is_of
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import day_of_slice, is_in_time, slice_at, slice_named

# In these states a run has computed the slice up to some offsets, and has not published it.
_COMPUTED_NOT_FINAL = (State.CLOSED, State.RECOMPUTING, State.AUDITING, State.BLOCKED)
# Each slice costs a query while the plan holds the lease. A plan looks up this many, and later plans the others.
_SPLIT_AT_ONCE = 200


def count_late(
    pipeline: Pipeline,
    landed: Landed,
    last: LateCountPosition | None,
    inputs: PlanInputs,
    ends: Mapping[int, int],
    newest: str | None,
    headers_of: Callable[[Collection[str]], Mapping[str, Header]],
) -> tuple[PlanInputs, LateCountPosition]:
    """Count, for each slice, the events that were landed since the last count, and after the slice was computed.

    ``newest``: the newest final slice. ``headers_of``: the headers of some days, for old slices with late events.

    Returns:
        the inputs with these numbers, and how far events are counted now.
    """
    topic_id = inputs.topic.topic_id
    now = LateCountPosition(topic_id=topic_id, ends=ends, at_ms=inputs.now_ms)
    if last and last.topic_id == topic_id:
        now = replace(now, since_ms=last.since_ms)
        rows = partial(landed.since, last.ends, last.since_ms)
    elif last:
        # The topic was re-created. The records that are landed already are counted now, once, by their arrival.
        now = replace(now, since_ms=landed.newest_arrival_ms())
        rows = partial(landed.since, {}, last.at_ms)
    else:
        rows = partial(landed.since, {}, 0)
    unfinished = {name: entry for name, entry in inputs.entries.items() if entry.state in _COMPUTED_NOT_FINAL}
    last_computed = max([*unfinished, *([newest] if newest else [])], default=None)
    if last_computed is None:
        return inputs, now
    events = rows(slice_named(pipeline, last_computed).end_ms + pipeline.window.reach_ms).to_pylist()
    touched = [_touched(pipeline, event["time"]) for event in events]
    headers = headers_of({day_of_slice(name) for names in touched for name in names})
    computed: dict[str, Header | LedgerLine] = {**unfinished, **headers}
    late, in_time = Counter[str](), Counter[str]()
    for event, names in zip(events, touched, strict=True):
        missing = [name for name in names if name in computed and _is_late(event, computed[name], inputs.topic)]
        late.update(missing)
        in_time.update(name for name in missing if _came_in_time(pipeline, name, event))
    found = {name: headers[name] for name in late if name in headers}
    return replace(inputs, headers={**inputs.headers, **found}, late=late, in_time=in_time), now


def count_in_time(
    pipeline: Pipeline, landed: Landed, inputs: PlanInputs, counted: LateCountPosition | None
) -> PlanInputs:
    """Look up how many late events arrived in time, for ledger lines without that number.

    An older version of Tideline wrote such lines. The slice is put into ``late``, with 0 if it has no new late events.
    So the plan writes the line again with ``in_time``, and later plans need not look it up.
    """
    not_split = [name for name, entry in inputs.entries.items() if entry.in_time is None][:_SPLIT_AT_ONCE]
    split = {name: _split(pipeline, landed, inputs, name, counted) for name in not_split}
    news = {name: inputs.late.get(name, 0) for name in split}
    return replace(inputs, entries={**inputs.entries, **split}, late={**inputs.late, **news})


def _split(
    pipeline: Pipeline, landed: Landed, inputs: PlanInputs, name: str, counted: LateCountPosition | None
) -> LedgerLine:
    entry, header = inputs.entries[name], inputs.headers.get(name)
    computed = entry if entry.state in _COMPUTED_NOT_FINAL else header
    if computed is None or (computed is header and header.verdict.startswith(ROLLED_BACK)):
        return replace(entry, in_time=0)
    _, in_time = _missed(pipeline, landed, computed, counted)
    return replace(entry, in_time=in_time)


def with_missed(
    lake: PipelineLake,
    line: LedgerLine,
    computed: Header | LedgerLine,
    newest: LedgerLine | None,
    counted: LateCountPosition | None,
) -> LedgerLine:
    """A run's line about a slice that it has computed, with the number of late events that the slice misses.

    ``computed``: the header of the slice if it is published, otherwise the same object as ``line``.
    If the slice's newest line is of this run, it has these numbers, with all that later plans have added. Otherwise the
    events that plans have counted so far are counted here.
    """
    if newest and is_of(computed, newest):
        return replace(line, late=newest.late, in_time=newest.in_time)
    landed = lake.events()
    late, in_time = _missed(lake.pipeline, landed, computed, counted) if landed else (0, 0)
    return replace(line, late=late, in_time=in_time)


def _missed(
    pipeline: Pipeline, landed: Landed, computed: Header | LedgerLine, counted: LateCountPosition | None
) -> tuple[int, int]:
    """Count the events that were landed after a slice was computed, and those of them that arrived in time.

    They are counted up to the position ``counted`` of the last plan.
    """
    if counted is None or counted.topic_id != _topic_id(computed):
        return 0, 0
    name = computed.slice
    before_ms = slice_named(pipeline, name).end_ms + pipeline.window.reach_ms
    rows = landed.since(computed.offsets, counted.since_ms, before_ms).to_pylist()
    counted_rows = (row for row in rows if row["offset"] < counted.ends.get(row["partition"], 0))
    missing = [row for row in counted_rows if name in _touched(pipeline, row["time"])]
    return len(missing), sum(_came_in_time(pipeline, name, row) for row in missing)


def _came_in_time(pipeline: Pipeline, name: str, row: Mapping[str, int]) -> bool:
    return is_in_time(pipeline, slice_named(pipeline, name), row["arrival"])


def _touched(pipeline: Pipeline, time_ms: int) -> list[str]:
    """The slices of the windows into which an event of this time falls.

    With sliding windows, an event of 100 ms after the begin of a slice also falls into windows of the slice before.

    >>> from jobs.pipelines import PIPELINES
    >>> _touched(PIPELINES["rolling_sum"], 60_100), _touched(PIPELINES["rolling_sum_sliding"], 60_100)
    (['19700101T000100Z'], ['19700101T000000Z', '19700101T000100Z'])
    """
    window, length = pipeline.window, pipeline.slice_seconds * 1000
    first = slice_at(pipeline, max(0, time_ms - window.size_ms + window.slide_ms)).start_ms
    return [slice_at(pipeline, start).name for start in range(first, time_ms + 1, length)]


def _is_late(row: Mapping[str, int], computed: Header | LedgerLine, topic: TopicEnds) -> bool:
    """Whether an event was not yet landed when a slice was computed.

    In the example all records before offset 40 were landed when the slice was computed. In the last line of the example
    the topic was re-created after that.

    >>> from jobs.lake.slices import Boundary
    >>> topic, boundary = TopicEnds(topic_id="t1", earliest={}, ends={}), Boundary(topic_id="t1", ends={0: 40})
    >>> computed = LedgerLine(slice="s", state=State.AUDITING, at_ms=1_000, run="r", boundary=boundary, offsets={0: 40})
    >>> [_is_late({"partition": 0, "offset": offset, "arrival": 900}, computed, topic) for offset in (39, 40)]
    [False, True]
    >>> new = TopicEnds(topic_id="t2", earliest={}, ends={})
    >>> _is_late({"partition": 0, "offset": 0, "arrival": 1_001}, computed, new)
    True
    """
    at_ms = computed.as_of_ms if isinstance(computed, Header) else computed.at_ms
    # A slice without offsets was computed when nothing of this topic was landed. But the event may be of an earlier
    # topic, and was landed then. So arrival times are compared.
    if computed.offsets and _topic_id(computed) == topic.topic_id:
        return row["offset"] >= computed.offsets.get(row["partition"], 0)
    # The offsets of a re-created topic begin anew, so only times can be compared.
    return row["arrival"] > at_ms


def _topic_id(computed: Header | LedgerLine) -> str | None:
    """The id of the topic to which the offsets belong."""
    if isinstance(computed, Header):
        return computed.topic_id
    return computed.boundary.topic_id if computed.boundary else None
