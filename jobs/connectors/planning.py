"""The plan of a recompute run: takes boundaries, counts late events, and decides which slices are due."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from deltalake.exceptions import DeltaError
from kafka import KafkaAdminClient

from jobs.connectors.clock import Clock
from jobs.connectors.control import Control, Lease
from jobs.connectors.epochs import Phase, Receipt
from jobs.connectors.events import Count, Landed
from jobs.connectors.final import FinalTable
from jobs.connectors.incidents import Incidents, blocked
from jobs.connectors.kafka import require
from jobs.connectors.late import count_late, tell_apart, with_missed
from jobs.connectors.ledger import Ledger
from jobs.connectors.runs import Plan, RunFolder, Work, discard_old, slices_left
from jobs.connectors.states import (
    MAX_SLICES,
    Boundary,
    Counted,
    Due,
    Entry,
    Header,
    Known,
    Request,
    State,
    Survey,
    Topic,
    begin,
    in_time_of,
    is_passed,
    survey,
    tide_line,
    with_late,
)
from jobs.folders import Folder
from jobs.pipelines.slices import Slice
from jobs.pipelines.spec import HOUR_MS, Pipeline, Source
from jobs.refusal import Refusal

# One who publishes a large slice sends it to its topic under the lease.
LEASE_PATIENCE_SECONDS = 300.0
_POLL_SECONDS = 0.2
_DAY_MS = 24 * HOUR_MS
# What is older than the source's horizon is rejected, so nothing that is older yet can be touched.
_MORE_HOURS = 24
# Ingest lands what has arrived a few seconds later: to wait for it is sooner than the next run.
INGEST_PATIENCE_SECONDS = 20.0


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
    counted: Counted | None = None


@contextmanager
def writing(lake_root: Folder, job: str) -> Iterator[Lease]:
    """The lease of a batch job for a short write: others who write wait their turn."""
    lease = _acquire(lake_root, job)
    # Not one that starts for too long: to send a weekend's slices takes a while.
    lease.show(phase=Phase.RUNNING)
    receipt = Receipt(time=time.time(), clean=False, cause="it failed while it wrote")
    try:
        yield lease
        receipt = Receipt(time=time.time(), clean=True, cause="written")
    finally:
        lease.release(receipt)


def _acquire(lake_root: Folder, job: str) -> Lease:
    control = Control.of(lake_root, job)
    # Here, too: what a store cannot do is not worth a wait.
    control.documents.require_exclusive_create()
    deadline = time.monotonic() + LEASE_PATIENCE_SECONDS
    while True:
        try:
            return Lease.acquire(control, env={})
        except Refusal:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def look(
    lake_root: Folder,
    client: KafkaAdminClient,
    pipeline: Pipeline,
    request: Request | None,
    clock: Clock,
) -> Planned:
    """What a run would do now; nothing is written. The clock is the broker's."""
    final, ledger = _read(lake_root, pipeline)
    seen = _see(lake_root, client, pipeline, final.headers() if final else {}, ledger, request, clock)
    surveyed = survey(pipeline, seen.known, request)
    return Planned(survey=surveyed, plan=_plan(pipeline, "", seen, surveyed))


def _read(lake_root: Folder, pipeline: Pipeline) -> tuple[FinalTable | None, Ledger | None]:
    """Both tables. Where a power cut has torn the log of one, its writer puts aside what is torn."""
    try:
        return FinalTable.read(lake_root, pipeline), Ledger.read(lake_root, pipeline)
    except DeltaError:
        with writing(lake_root, pipeline.recompute_job):
            return FinalTable.open(lake_root, pipeline), Ledger.open(lake_root, pipeline)


def await_ingest(
    lake_root: Folder,
    client: KafkaAdminClient,
    pipeline: Pipeline,
    run: str,
    request: Request | None,
    clock: Clock,
) -> None:
    """Take the boundaries that are to be taken now, and let ingest reach those that the next plan asks for.

    These and no others: a slice that is over meanwhile is left to the next run, or there would always be one more.
    """
    waiting = look(lake_root, client, pipeline, request, clock).survey.waiting
    if not waiting:
        return
    nothing = Request(slices=(), reason="its time has come")
    taken = make(lake_root, client, pipeline, run, nothing, clock, begins=False).survey.taken
    boundaries = [taken.get(slice_, boundary) for slice_, boundary in waiting.items()]
    topic, deadline = _topic(client, pipeline.source), time.monotonic() + INGEST_PATIENCE_SECONDS
    while time.monotonic() < deadline:
        ends = topic.landed(_ends(Landed.at(lake_root, pipeline.source), pipeline.source, topic))
        if all(boundary.is_reached(ends) for boundary in boundaries):
            return
        time.sleep(_POLL_SECONDS)


def make(
    lake_root: Folder,
    client: KafkaAdminClient,
    pipeline: Pipeline,
    run: str,
    request: Request | None,
    clock: Clock,
    *,
    begins: bool = True,
) -> Planned:
    """Plan a run: boundaries and states go into the ledger, the plan into the run's folder, unless it only looks."""
    with writing(lake_root, pipeline.recompute_job) as lease:
        headers, ledger = FinalTable.open(lake_root, pipeline).headers(), Ledger.open(lake_root, pipeline)
        seen = _see(lake_root, client, pipeline, headers, ledger, request, clock)
        surveyed = survey(pipeline, seen.known, request)
        plan = _plan(pipeline, run, seen, surveyed)
        lease.check()
        _close_incidents(lake_root, pipeline, ledger)
        discard_old(lake_root, pipeline)
        folder = RunFolder.of(lake_root, pipeline, run)
        if begins:
            # Before the ledger says that it is under way: by its folder the next run finds what this one leaves.
            lease.check()
            folder.begin(plan)
        _tell(ledger, seen, surveyed, plan)
        if begins and not plan.work and not plan.untold:
            # Every plan looks through the folders of runs.
            folder.end()
    return Planned(survey=surveyed, plan=plan)


def _close_incidents(lake_root: Folder, pipeline: Pipeline, ledger: Ledger) -> None:
    """Of blocked slices that are final: who published one may have died before it said so."""
    incidents, prefix = Incidents.of(lake_root), blocked(pipeline.name, "")
    names = [incident.key.removeprefix(prefix) for incident in incidents.still_open(prefix)]
    final = [name for name, entry in ledger.newest(names).items() if entry.state is State.FINAL]
    incidents.close_blocked(pipeline.name, final)


def _see(
    lake_root: Folder,
    client: KafkaAdminClient,
    pipeline: Pipeline,
    headers: Mapping[str, Header],
    ledger: Ledger | None,
    request: Request | None,
    clock: Clock,
) -> _Seen:
    # The clock first: what the topic holds once a slice's time is over is all that came in time, or more.
    now_ms, source = clock(), pipeline.source
    topic, landed = _topic(client, source), Landed.at(lake_root, source)
    ends = _ends(landed, source, topic)
    known = Known(
        now_ms=now_ms,
        first_ms=landed.first_ms() if landed else None,
        topic=topic,
        landed=topic.landed(ends),
        headers=headers,
        entries={},
    )
    if ledger is None:
        return _Seen(known=known, landed=landed, ends=ends)
    known = replace(known, left=slices_left(lake_root, pipeline) & headers.keys())
    known = _with_entries(pipeline, known, ledger, request)
    # A topic of which nothing is landed yet has no late events: those that are landed are another's.
    if landed is None or not ends:
        return _Seen(known=known, landed=landed, ends=ends)
    last = ledger.counted()
    known, counted = count_late(pipeline, landed, last, known, ends)
    if missing := [name for name in known.late if name not in known.entries]:
        known = replace(known, entries={**known.entries, **ledger.newest(missing)})
    return _Seen(known=tell_apart(pipeline, landed, known, last), landed=landed, ends=ends, counted=counted)


def _with_entries(pipeline: Pipeline, known: Known, ledger: Ledger, request: Request | None) -> Known:
    """What the ledger says of slices that may be due, which are those of the last days: it grows for ever."""
    first_ms = begin(pipeline, known)
    line_ms = tide_line(pipeline, first_ms, known.headers)
    start_ms = (first_ms or 0) if line_ms is None else line_ms
    since_ms = max(0, min(start_ms, known.now_ms - (pipeline.source.horizon_hours + _MORE_HOURS) * HOUR_MS))
    recent, asked = Slice(since_ms, since_ms).name, {slice_.name for slice_ in request.slices} if request else set()
    wanted = asked | set(known.left)
    told = [n for n, h in known.headers.items() if n >= recent or n in wanted or h.as_of_ms >= since_ms]
    days = {Slice(at, at).name[:8] for at in range(since_ms - since_ms % _DAY_MS, known.now_ms + 1, _DAY_MS)}
    versions = {name: known.headers[name].version for name in told if name not in asked}
    entries, settled = ledger.unsettled(days | {name[:8] for name in (*told, *asked)}, versions)
    rest = tuple(name for name in told if name not in settled)
    return replace(known, entries=entries, settled=settled, with_entries=rest, since_ms=since_ms)


def _topic(client: KafkaAdminClient, source: Source) -> Topic:
    found = require(client, [source.name])[source.name]
    return Topic(topic_id=found.topic_id, earliest=found.earliest, ends=found.latest)


def _ends(landed: Landed | None, source: Source, topic: Topic) -> dict[int, int]:
    return landed.ends(source.name, topic.topic_id) if landed else {}


def note(lake_root: Folder, pipeline: Pipeline, lines: Iterable[Entry]) -> None:
    """Write what becomes of the slices of a run, between its plan and its publish."""
    said = list(lines)
    if not said:
        return
    with writing(lake_root, pipeline.recompute_job):
        ledger = Ledger.open(lake_root, pipeline)
        newest, counted = ledger.newest([line.slice for line in said]), ledger.counted()
        said = [line for line in said if not _is_old(line, newest.get(line.slice))]
        ledger.append(with_missed(lake_root, pipeline, said, newest, counted))


def _is_old(line: Entry, newest: Entry | None) -> bool:
    """Whether a run has nothing more to say of a slice: another one has published this version, or is at the next."""
    published = newest is not None and newest.state is State.FINAL and newest.version == line.version
    return published or is_passed(line, newest)


def _plan(pipeline: Pipeline, run: str, seen: _Seen, surveyed: Survey) -> Plan:
    due, landed = surveyed.due[:MAX_SLICES], seen.landed
    counts = landed.count(pipeline, [item.slice for item in due]) if landed else {}
    return Plan(
        pipeline=pipeline.name,
        run=run,
        as_of_ms=seen.known.now_ms,
        fingerprint=pipeline.fingerprint,
        checks=pipeline.checks_fingerprint,
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


def _bounded(slice_: Slice, boundary: Boundary, entry: Entry | None, run: str, now_ms: int) -> Entry:
    """A slice with its boundary. One that has a line stays what it is: its topic was re-created, all of it is new."""
    if entry:
        return replace(entry, boundary=boundary, offsets={}, at_ms=now_ms)
    return Entry(
        slice=slice_.name, state=State.OPEN, at_ms=now_ms, run=run, boundary=boundary, reason="its time has come"
    )


def _tell(ledger: Ledger, seen: _Seen, surveyed: Survey, plan: Plan) -> None:
    """Write boundaries, then what is closed or reopened, then what is being recomputed."""
    known, now_ms = seen.known, seen.known.now_ms
    bounded = {
        slice_.name: _bounded(slice_, boundary, known.entries.get(slice_.name), plan.run, now_ms)
        for slice_, boundary in surveyed.taken.items()
        if slice_.name not in known.headers
    }
    ledger.append(bounded.values())
    entries = {**known.entries, **bounded}
    planned = {work.slice for work in plan.work}
    # Late events are counted once: from here on they are in the lines.
    late = [
        with_late(entries[name], count, now_ms, in_time=known.in_time.get(name, 0))
        for name, count in known.late.items()
        if name in entries and name not in planned
    ]
    begun = [
        plan.entry(work, State.REOPENED if work.version else State.CLOSED, at_ms=now_ms, late=work.late)
        for work in plan.work
    ]
    begun = [replace(line, in_time=in_time_of(known, line.slice)) for line in begun]
    ledger.append([*begun, *late], counted=seen.counted)
    ledger.append(plan.entry(work, State.RECOMPUTING, at_ms=now_ms) for work in plan.work)
