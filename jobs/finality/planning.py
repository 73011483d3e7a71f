"""The plan of a recompute run: takes boundaries, counts late events, and decides which slices are due."""

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from deltalake.exceptions import DeltaError
from kafka import KafkaAdminClient

from jobs.broker.clock import Clock
from jobs.control.epochs import Phase, Receipt
from jobs.control.events_needed import said_needed, say_needed
from jobs.control.folder import Control
from jobs.control.incident import blocked
from jobs.control.incidents import Incidents
from jobs.control.lease import Lease
from jobs.finality.due import (
    MAX_SLICES,
    Due,
    Request,
    SliceSurvey,
    in_time_of,
    needed_from_ms,
    outdated_slices,
    removed,
    survey,
)
from jobs.finality.late import with_missed
from jobs.finality.plan_inputs import PlanSnapshot, landed_ends, read_inputs, topic_of
from jobs.finality.run.folder import Plan, RunFolder, Work, discard_old
from jobs.lake.events import Count, Landed
from jobs.lake.final import FinalTable
from jobs.lake.ledger import Ledger
from jobs.lake.slices import Boundary, Entry, State, is_passed, with_late
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import Slice
from jobs.refusal import Refusal
from jobs.storage.folders import Folder

# A publish keeps the lease while it sends a large slice to the topic, so other writers may have to wait long.
LEASE_PATIENCE_SECONDS = 300.0
_POLL_SECONDS = 0.2
# Ingest lands a record a few seconds after its arrival. Waiting for it is faster than leaving it to the next run.
INGEST_PATIENCE_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The findings of a plan, and the work of its run."""

    survey: SliceSurvey
    plan: Plan


@contextmanager
def writing(lake_root: Folder, job: str) -> Iterator[Lease]:
    """Hold the lease of a batch job for a short write. Other writers wait their turn."""
    lease = _acquire(lake_root, job)
    # Otherwise a long write would look like a start that takes too long: sending a weekend's slices takes a while.
    lease.show(phase=Phase.RUNNING)
    receipt = Receipt(time=time.time(), clean=False, cause="it failed while it wrote")
    try:
        yield lease
        receipt = Receipt(time=time.time(), clean=True, cause="written")
    finally:
        lease.release(receipt)


def _acquire(lake_root: Folder, job: str) -> Lease:
    control = Control.of(lake_root, job)
    # Checked here, too: if the store lacks this, waiting does not help.
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
    """Return what a run would do now. No plan, boundary or state is written. The clock is the broker's."""
    final, ledger = _read(lake_root, pipeline)
    snapshot = read_inputs(lake_root, client, pipeline, final, ledger, request, clock)
    surveyed = survey(pipeline, snapshot.inputs, request)
    return Planned(survey=surveyed, plan=_plan(pipeline, "", snapshot, surveyed))


def _read(lake_root: Folder, pipeline: Pipeline) -> tuple[FinalTable | None, Ledger | None]:
    """Read both tables. If a power cut has torn a log, they are opened to write, which puts the torn files aside."""
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
    """Take the boundaries that are due now, and wait until ingest has reached those of the next plan.

    It waits for no other slice. A slice that is over meanwhile is left to the next run; otherwise there would always be
    one more to wait for.
    """
    waiting = look(lake_root, client, pipeline, request, clock).survey.waiting
    if not waiting:
        return
    nothing = Request(slices=(), reason="its time has come")
    taken = make(lake_root, client, pipeline, run, nothing, clock, begins=False).survey.taken
    boundaries = [taken.get(slice_, boundary) for slice_, boundary in waiting.items()]
    topic, deadline = topic_of(client, pipeline.source), time.monotonic() + INGEST_PATIENCE_SECONDS
    while time.monotonic() < deadline:
        ends = topic.landed(landed_ends(Landed.at(lake_root, pipeline.source), pipeline.source, topic))
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
    """Plan a run: write boundaries and states into the ledger, and the plan into the run's folder.

    With ``begins=False`` the folder is not written. The ledger is written all the same.
    """
    with writing(lake_root, pipeline.recompute_job) as lease:
        final, ledger = FinalTable.open(lake_root, pipeline), Ledger.open(lake_root, pipeline)
        snapshot = read_inputs(lake_root, client, pipeline, final, ledger, request, clock)
        surveyed = survey(pipeline, snapshot.inputs, request)
        plan = _plan(pipeline, run, snapshot, surveyed)
        lease.check()
        still_blocked = _close_incidents(lake_root, pipeline, ledger)
        folder = RunFolder.of(lake_root, pipeline, run)
        if begins:
            # The folder is written before the ledger. If this run is killed, the next one finds its slices there.
            lease.check()
            folder.begin(plan)
        decides = begins and not request
        _write_states(ledger, snapshot, surveyed, plan, decides=decides)
        if begins and not plan.work and not plan.unannounced:
            # Every plan reads the folders of all runs that have not ended, so a run without work ends at once.
            folder.end()
        discard_old(lake_root, pipeline, gives_up=decides, but=folder)
        lease.check()
        _say_needed(lake_root, pipeline, snapshot, surveyed, {*still_blocked, *snapshot.inputs.left}, request)
    return Planned(survey=surveyed, plan=plan)


def _say_needed(
    lake_root: Folder,
    pipeline: Pipeline,
    snapshot: PlanSnapshot,
    surveyed: SliceSurvey,
    open_: Collection[str],
    request: Request | None,
) -> None:
    """Store from which time on this pipeline still needs events.

    A plan for a request does not see every due slice, so it never moves that time forward.
    """
    from_ms, job = needed_from_ms(pipeline, snapshot.inputs, surveyed, open_), pipeline.recompute_job
    if request:
        from_ms = min(from_ms, said_needed(lake_root, job) or 0)
    say_needed(lake_root, job, from_ms)


def _close_incidents(lake_root: Folder, pipeline: Pipeline, ledger: Ledger) -> list[str]:
    """Close the incidents of blocked slices that are final now, and return those that are still blocked.

    The run that published such a slice may have been killed before it closed the incident.
    """
    incidents, prefix = Incidents.of(lake_root), blocked(pipeline.name, "")
    names = [incident.key.removeprefix(prefix) for incident in incidents.still_open(prefix)]
    final = [name for name, entry in ledger.newest(names).items() if entry.state is State.FINAL]
    incidents.close_blocked(pipeline.name, final)
    return [name for name in names if name not in final]


def outdated(lake_root: Folder, pipeline: Pipeline) -> tuple[Slice, ...]:
    """Every final slice of an older definition that still has its events. Unlike a plan, this reads all headers."""
    final, landed = FinalTable.read(lake_root, pipeline), Landed.at(lake_root, pipeline.source)
    headers, events_from_ms = final.headers() if final else {}, landed.from_ms if landed else 0
    found = outdated_slices(pipeline, headers, events_from_ms)
    if not found and outdated_slices(pipeline, headers, 0):
        raise Refusal(removed(pipeline.source, events_from_ms))
    return found


def note(lake_root: Folder, pipeline: Pipeline, lines: Iterable[Entry]) -> None:
    """Write the states of a run's slices into the ledger, between its plan and its publish."""
    said = list(lines)
    if not said:
        return
    with writing(lake_root, pipeline.recompute_job):
        ledger = Ledger.open(lake_root, pipeline)
        newest, counted = ledger.newest([line.slice for line in said]), ledger.counted()
        said = [line for line in said if not is_passed(line, newest.get(line.slice))]
        ledger.append(with_missed(lake_root, pipeline, said, newest, counted))


def _plan(pipeline: Pipeline, run: str, snapshot: PlanSnapshot, surveyed: SliceSurvey) -> Plan:
    due, landed = surveyed.due[:MAX_SLICES], snapshot.landed
    counts = landed.count(pipeline, [item.slice for item in due]) if landed else {}
    return Plan(
        pipeline=pipeline.name,
        run=run,
        as_of_ms=snapshot.inputs.now_ms,
        fingerprint=pipeline.fingerprint,
        checks=pipeline.checks_fingerprint,
        topic_id=snapshot.inputs.topic.topic_id,
        offsets=snapshot.ends,
        events_version=landed.version if landed else 0,
        work=tuple(_work(item, counts.get(item.slice.name, Count())) for item in due),
        unannounced=surveyed.unannounced,
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
    """The ledger line of a slice with its new boundary.

    If the slice has a line already, its topic was re-created. It keeps its state, and loses its offsets, because all
    records of the new topic are new to it.
    """
    if entry:
        return replace(entry, boundary=boundary, offsets={}, at_ms=now_ms)
    return Entry(
        slice=slice_.name, state=State.OPEN, at_ms=now_ms, run=run, boundary=boundary, reason="its time has come"
    )


def _undecided(snapshot: PlanSnapshot, surveyed: SliceSurvey, plan: Plan, *, decides: bool) -> tuple[str, ...]:
    """Slices with counted late events that may still reopen them, on days that the next plan does not read.

    They exist because a plan for a request decides about no other slice, and a run takes a limited number of slices.
    """
    inputs, last = snapshot.inputs, snapshot.counted_before
    found = {*inputs.late, *(last.undecided if last else ())}
    if decides:
        # This plan may remove the folders of killed runs, so their due slices must be kept here.
        due = {slice_.name for slice_ in (*(due.slice for due in surveyed.due), *surveyed.waiting)}
        found = {*found, *inputs.left} & due
    found -= {work.slice for work in plan.work}
    return tuple(sorted(name for name in found if name[:8] not in (inputs.days or ())))


def _write_states(ledger: Ledger, snapshot: PlanSnapshot, surveyed: SliceSurvey, plan: Plan, *, decides: bool) -> None:
    """Write boundaries, then closed or reopened slices, then slices that are being recomputed.

    ``decides``: whether the plan takes every due slice, as far as there is room.
    """
    inputs, now_ms = snapshot.inputs, snapshot.inputs.now_ms
    bounded = {
        slice_.name: _bounded(slice_, boundary, inputs.entries.get(slice_.name), plan.run, now_ms)
        for slice_, boundary in surveyed.taken.items()
        if slice_.name not in inputs.headers
    }
    ledger.append(bounded.values())
    entries = {**inputs.entries, **bounded}
    planned = {work.slice for work in plan.work}
    # Late events are counted once: from here on the ledger lines hold their numbers.
    late = [
        with_late(entries[name], count, now_ms, in_time=inputs.in_time.get(name, 0))
        for name, count in inputs.late.items()
        if name in entries and name not in planned
    ]
    begun = [
        plan.entry(work, State.REOPENED if work.version else State.CLOSED, at_ms=now_ms, late=work.late)
        for work in plan.work
    ]
    begun = [replace(line, in_time=in_time_of(inputs, line.slice)) for line in begun]
    undecided = _undecided(snapshot, surveyed, plan, decides=decides)
    counted = replace(snapshot.counted, undecided=undecided) if snapshot.counted else None
    ledger.append([*begun, *late], counted=counted)
    ledger.append(plan.entry(work, State.RECOMPUTING, at_ms=now_ms) for work in plan.work)
