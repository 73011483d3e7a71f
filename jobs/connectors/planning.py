"""The plan of a recompute run: takes boundaries, counts late events, and decides which slices are due."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kafka import KafkaAdminClient

from jobs.connectors.control import Control, Lease
from jobs.connectors.epochs import Receipt
from jobs.connectors.events import Count, Landed
from jobs.connectors.final import FinalTable
from jobs.connectors.kafka import require
from jobs.connectors.ledger import Ledger
from jobs.connectors.runs import Plan, RunFolder, Work, discard_old
from jobs.connectors.states import (
    Due,
    Entry,
    Header,
    Known,
    Request,
    State,
    Survey,
    Topic,
    survey,
    with_late,
)
from jobs.pipelines.slices import slice_at, slice_named
from jobs.pipelines.spec import Pipeline
from jobs.refusal import Refusal

# A longer gap is healed by several runs.
MAX_SLICES = 5000
# One who publishes a large slice sends it to its topic under the lease.
LEASE_PATIENCE_SECONDS = 300.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What was found, and what the run does."""

    survey: Survey
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What tables and topic said, all of it read once."""

    known: Known
    landed: Landed | None
    ends: Mapping[int, int]


@contextmanager
def writing(lake_root: Path, job: str) -> Iterator[Lease]:
    """The lease of a batch job for a short write: others who write wait their turn."""
    lease = _acquire(lake_root, job)
    receipt = Receipt(time=time.time(), clean=False, cause="it failed while it wrote")
    try:
        yield lease
        receipt = Receipt(time=time.time(), clean=True, cause="written")
    finally:
        lease.release(receipt)


def _acquire(lake_root: Path, job: str) -> Lease:
    deadline = time.monotonic() + LEASE_PATIENCE_SECONDS
    while True:
        try:
            return Lease.acquire(Control.of(lake_root, job), env={})
        except Refusal:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def look(
    lake_root: Path,
    client: KafkaAdminClient,
    pipeline: Pipeline,
    request: Request | None = None,
    clock: Callable[[], float] = time.time,
) -> Planned:
    """What a run would do now; nothing is written."""
    final, ledger = FinalTable.read(lake_root, pipeline), Ledger.read(lake_root, pipeline)
    seen = _see(lake_root, client, pipeline, final.headers() if final else {}, ledger, clock)
    surveyed = survey(pipeline, seen.known, request)
    return Planned(survey=surveyed, plan=_plan(pipeline, "", seen, surveyed))


def make(
    lake_root: Path,
    client: KafkaAdminClient,
    pipeline: Pipeline,
    run: str,
    request: Request | None = None,
    clock: Callable[[], float] = time.time,
) -> Planned:
    """Plan a run: boundaries and states go into the ledger, the plan into the run's folder."""
    with writing(lake_root, pipeline.recompute_job) as lease:
        headers, ledger = FinalTable.open(lake_root, pipeline).headers(), Ledger.open(lake_root, pipeline)
        seen = _see(lake_root, client, pipeline, headers, ledger, clock)
        surveyed = survey(pipeline, seen.known, request)
        plan = _plan(pipeline, run, seen, surveyed)
        lease.check()
        _tell(ledger, seen, surveyed, plan)
        discard_old(lake_root, pipeline)
        RunFolder.of(lake_root, pipeline, run).begin(plan)
    return Planned(survey=surveyed, plan=plan)


def _see(
    lake_root: Path,
    client: KafkaAdminClient,
    pipeline: Pipeline,
    headers: Mapping[str, Header],
    ledger: Ledger | None,
    clock: Callable[[], float],
) -> _Seen:
    # The clock first: what the topic holds once a slice's time is over is all that came in time, or more.
    now_ms, source = round(clock() * 1000), pipeline.source
    found = require(client, [source.name])[source.name]
    topic = Topic(topic_id=found.topic_id, earliest=found.earliest, ends=found.latest)
    landed = Landed.at(lake_root, source)
    ends = landed.ends(source.name, found.topic_id) if landed else {}
    entries = ledger.newest() if ledger else {}
    late = _count_late(pipeline, landed, ledger, topic, headers, entries) if landed and ledger else {}
    known = Known(
        now_ms=now_ms,
        first_ms=landed.first_ms() if landed else None,
        topic=topic,
        landed=topic.landed(ends),
        headers=headers,
        entries=entries,
        late=late,
    )
    return _Seen(known=known, landed=landed, ends=ends)


def _count_late(
    pipeline: Pipeline,
    landed: Landed,
    ledger: Ledger,
    topic: Topic,
    headers: Mapping[str, Header],
    entries: Mapping[str, Entry],
) -> Counter[str]:
    """Events that came since the last count, and touch a slice that was judged without them."""
    blocked = {name: entry for name, entry in entries.items() if entry.state is State.BLOCKED}
    judged: dict[str, Header | Entry] = {**blocked, **headers}
    if not judged:
        return Counter()
    window, length = pipeline.window, pipeline.slice_seconds * 1000
    before_ms = slice_named(pipeline, max(judged)).end_ms + window.reach_ms
    late = Counter[str]()
    for row in landed.since(ledger.seen_late(topic.topic_id), before_ms).to_pylist():
        first = slice_at(pipeline, max(0, row["time"] - window.size_ms + window.slide_ms)).start_ms
        names = (slice_at(pipeline, start).name for start in range(first, row["time"] + 1, length))
        late.update(name for name in names if name in judged and _is_late(row, judged[name], topic))
    return late


def _is_late(row: Mapping[str, int], judged: Header | Entry, topic: Topic) -> bool:
    """Whether an event was not yet landed when a slice was judged."""
    at_ms = judged.as_of_ms if isinstance(judged, Header) else judged.at_ms
    topic_id = judged.topic_id if isinstance(judged, Header) else judged.boundary and judged.boundary.topic_id
    if topic_id == topic.topic_id:
        return row["offset"] >= judged.offsets.get(row["partition"], 0)
    # Offsets of a topic that was re-created begin anew: only the time can tell.
    return row["arrival"] > at_ms


def _plan(pipeline: Pipeline, run: str, seen: _Seen, surveyed: Survey) -> Plan:
    due, landed = surveyed.due[:MAX_SLICES], seen.landed
    counts = landed.count(pipeline, [item.slice for item in due]) if landed else {}
    return Plan(
        pipeline=pipeline.name,
        run=run,
        as_of_ms=seen.known.now_ms,
        fingerprint=pipeline.fingerprint,
        topic_id=seen.known.topic.topic_id,
        offsets=seen.ends,
        events_version=landed.version if landed else 0,
        work=tuple(_work(item, counts.get(item.slice.name, Count())) for item in due),
        untold=surveyed.untold,
    )


def _work(due: Due, count: Count) -> Work:
    return Work(
        slice=due.slice.name,
        version=due.version,
        reason=due.reason,
        boundary=due.boundary,
        events=count.events,
        window_events=count.window_events,
        late=due.late,
    )


def _tell(ledger: Ledger, seen: _Seen, surveyed: Survey, plan: Plan) -> None:
    """Write boundaries, then what is closed or reopened, then what is being recomputed."""
    known, now_ms = seen.known, seen.known.now_ms
    opened = partial(Entry, state=State.OPEN, at_ms=now_ms, run=plan.run, reason="its time has come")
    ledger.append(
        opened(slice=slice_.name, boundary=boundary)
        for slice_, boundary in surveyed.taken.items()
        if slice_.name not in known.headers
    )
    planned = {work.slice for work in plan.work}
    # Late events are counted once: from here on they are in the lines.
    late = [
        with_late(known.entries[name], count, now_ms)
        for name, count in known.late.items()
        if name in known.entries and name not in planned
    ]
    begun = [_entry(plan, work, State.REOPENED if work.version else State.CLOSED) for work in plan.work]
    ledger.append([*begun, *late], seen_late=(plan.topic_id, seen.ends))
    ledger.append(_entry(plan, work, State.RECOMPUTING) for work in plan.work)


def _entry(plan: Plan, work: Work, state: State) -> Entry:
    return Entry(
        slice=work.slice,
        state=state,
        at_ms=plan.as_of_ms,
        run=plan.run,
        version=work.version + 1,
        fingerprint=plan.fingerprint,
        boundary=work.boundary,
        offsets=plan.offsets,
        events_version=plan.events_version,
        events=work.events,
        late=work.late,
        reason=work.reason,
    )
