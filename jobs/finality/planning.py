"""The plan of a recompute run: takes boundaries, counts late events, and decides which slices are due."""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from deltalake.exceptions import DeltaError
from kafka import KafkaAdminClient

from jobs.broker.clock import Clock
from jobs.control.events_needed import read_needed_from, write_needed_from
from jobs.control.incident import blocked_key
from jobs.control.lease import Lease
from jobs.control.writing import writing
from jobs.finality.due import (
    BOUNDARIES_ONLY,
    MAX_SLICES,
    Due,
    Request,
    SliceSurvey,
    in_time_of,
    needed_from_ms,
    outdated_slices,
    survey,
    why_removed,
)
from jobs.finality.late import with_missed
from jobs.finality.plan_inputs import PlanSnapshot, landed_ends, read_inputs, topic_of
from jobs.finality.run.folder import Plan, RunFolder, Work, discard_old
from jobs.lake.events import Count
from jobs.lake.final import FinalTable
from jobs.lake.ledger import Ledger
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.slices import Boundary, LedgerLine, State, is_superseded, with_late
from jobs.pipelines.slices import Slice, day_of_slice
from jobs.refusal import Refusal

_POLL_SECONDS = 0.2
# `ingest` lands a record a few seconds after its arrival. To wait is faster than to leave the slice to the next run.
INGEST_PATIENCE_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan, and the survey of slices from which it was made."""

    survey: SliceSurvey
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The state of tables and topic, and the survey of slices that follows from it."""

    snapshot: PlanSnapshot
    survey: SliceSurvey


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Plans the recompute runs of a pipeline. ``clock`` gives the broker's time."""

    lake: PipelineLake
    client: KafkaAdminClient
    clock: Clock

    def preview(self, request: Request | None = None) -> Planned:
        """Return what a run would do now. No plan, boundary or state is written."""
        found = self._survey(*self._read(), request)
        return Planned(survey=found.survey, plan=self._plan_of("", found))

    def await_ingest(self, run: str, request: Request | None = None) -> None:
        """Take the boundaries of slices that are over, and wait until `ingest` has landed all records before them.

        So the plan that follows finds these slices closed. The wait takes `INGEST_PATIENCE_SECONDS` at most, and is
        only for slices that are over when it begins. Otherwise there would always be one more slice to wait for.
        """
        # A survey is enough here, because the plan that follows counts the events.
        waiting = self._survey(*self._read(), request).survey.waiting
        if not waiting:
            return
        taken = self.take_boundaries(run)
        boundaries = [taken.get(slice_, boundary) for slice_, boundary in waiting.items()]
        source = self.lake.pipeline.source
        topic, deadline = topic_of(self.client, source), time.monotonic() + INGEST_PATIENCE_SECONDS
        while time.monotonic() < deadline:
            ends = topic.landed(landed_ends(self.lake.events(), source, topic))
            if all(boundary.is_reached(ends) for boundary in boundaries):
                return
            time.sleep(_POLL_SECONDS)

    def take_boundaries(self, run: str) -> Mapping[Slice, Boundary]:
        """Take a boundary for each slice that is over and has none. Write these into the ledger, and return them."""
        with writing(self.lake.root, self.lake.pipeline.recompute_job) as lease:
            final, ledger = self.lake.open_final(), self.lake.open_ledger()
            found = self._survey(final, ledger, BOUNDARIES_ONLY)
            self._write(lease, ledger, found, self._plan_of(run, found), BOUNDARIES_ONLY)
        return found.survey.taken

    def plan(self, run: str, request: Request | None = None) -> Planned:
        """Plan a run: write the plan into the run's folder, and boundaries and states into the ledger."""
        with writing(self.lake.root, self.lake.pipeline.recompute_job) as lease:
            final, ledger = self.lake.open_final(), self.lake.open_ledger()
            found = self._survey(final, ledger, request)
            plan, folder = self._plan_of(run, found), RunFolder.of(self.lake, run)
            # The folder is written before the ledger. If this run is killed, the next one finds its slices there.
            lease.check()
            folder.begin(plan)
            self._write(lease, ledger, found, plan, request)
            if not plan.work and not plan.unannounced:
                # Every plan reads the folders of all runs that have not ended, so a run without work ends at once.
                folder.end()
            discard_old(self.lake, and_abandoned=not request, but=folder)
        return Planned(survey=found.survey, plan=plan)

    def _read(self) -> tuple[FinalTable | None, Ledger | None]:
        """Read both tables. If a power cut has torn a log, open them to write, which puts the torn files aside."""
        try:
            return self.lake.final(), self.lake.ledger()
        except DeltaError:
            with writing(self.lake.root, self.lake.pipeline.recompute_job):
                return self.lake.open_final(), self.lake.open_ledger()

    def _survey(self, final: FinalTable | None, ledger: Ledger | None, request: Request | None) -> _Found:
        snapshot = read_inputs(self.lake, self.client, final, ledger, request, self.clock)
        return _Found(snapshot=snapshot, survey=survey(self.lake.pipeline, snapshot.inputs, request))

    def _plan_of(self, run: str, found: _Found) -> Plan:
        due, snapshot = found.survey.due[:MAX_SLICES], found.snapshot
        landed, pipeline = snapshot.landed, self.lake.pipeline
        counts = landed.count(pipeline, [item.slice for item in due]) if landed else {}
        return Plan(
            pipeline=pipeline.name,
            run=run,
            as_of_ms=snapshot.inputs.now_ms,
            fingerprint=pipeline.fingerprint,
            checks=pipeline.checks_fingerprint,
            topic_id=snapshot.inputs.topic.topic_id,
            offsets=landed_ends(landed, pipeline.source, snapshot.inputs.topic),
            events_version=landed.version if landed else 0,
            work=tuple(_work(item, counts.get(item.slice.name, Count())) for item in due),
            unannounced=found.survey.unannounced,
        )

    def _write(self, lease: Lease, ledger: Ledger, found: _Found, plan: Plan, request: Request | None) -> None:
        """Write boundaries and states into the ledger. Store the time from which on the pipeline still needs events."""
        lease.check()
        still_blocked = self._close_incidents(ledger)
        lease.check()
        _write_lines(ledger, found, plan, decides=not request)
        lease.check()
        self._write_needed_from(found, {*still_blocked, *found.snapshot.inputs.left}, request)

    def _write_needed_from(self, found: _Found, open_: Collection[str], request: Request | None) -> None:
        """Store the time from which on this pipeline still needs events.

        A plan for a request does not see every due slice, so it never moves that time forward.
        """
        from_ms = needed_from_ms(self.lake.pipeline, found.snapshot.inputs, found.survey, open_)
        job = self.lake.pipeline.recompute_job
        if request:
            from_ms = min(from_ms, read_needed_from(self.lake.root, job) or 0)
        write_needed_from(self.lake.root, job, from_ms)

    def _close_incidents(self, ledger: Ledger) -> list[str]:
        """Close the incidents of blocked slices that are final now, and return those that are still blocked.

        The run that published such a slice may have been killed before it closed the incident.
        """
        name = self.lake.pipeline.name
        incidents, prefix = self.lake.incidents(), blocked_key(name, "")
        names = [incident.key.removeprefix(prefix) for incident in incidents.still_open(prefix)]
        final = [each for each, entry in ledger.newest(names).items() if entry.state is State.FINAL]
        incidents.close_blocked(name, final)
        return [each for each in names if each not in final]


def outdated(lake: PipelineLake) -> tuple[Slice, ...]:
    """Every final slice of an older definition that still has its events. Unlike a plan, this reads all headers."""
    pipeline, final, landed = lake.pipeline, lake.final(), lake.events()
    headers, events_from_ms = final.headers() if final else {}, landed.events_from_ms if landed else 0
    found = outdated_slices(pipeline, headers, events_from_ms)
    if not found and outdated_slices(pipeline, headers, 0):
        raise Refusal(why_removed(pipeline.source, events_from_ms))
    return found


def write_states(lake: PipelineLake, lines: Iterable[LedgerLine]) -> None:
    """Write the states of a run's slices into the ledger, between its plan and its publish."""
    wanted = list(lines)
    if not wanted:
        return
    with writing(lake.root, lake.pipeline.recompute_job):
        ledger = lake.open_ledger()
        newest, counted = ledger.newest([line.slice for line in wanted]), ledger.late_count_position()
        wanted = [line for line in wanted if not is_superseded(line, newest.get(line.slice))]
        ledger.append(with_missed(lake, line, line, newest.get(line.slice), counted) for line in wanted)


def _work(due: Due, count: Count) -> Work:
    """The work on a due slice. ``count``: the plan's counts of its events, with which the audit compares the rows."""
    return Work(
        slice=due.slice.name,
        version=due.version,
        reason=due.reason,
        boundary=due.boundary,
        events=count.events,
        window_events=count.window_events,
        late=due.late,
    )


def _bounded(slice_: Slice, boundary: Boundary, entry: LedgerLine | None, run: str, now_ms: int) -> LedgerLine:
    """The ledger line of a slice with its new boundary.

    A slice that has a line already gets a new boundary only if its topic was re-created. The line keeps the state. It
    loses the offsets, because they are those of the earlier topic.
    """
    if entry:
        return replace(entry, boundary=boundary, offsets={}, at_ms=now_ms)
    return LedgerLine(slice=slice_.name, state=State.OPEN, at_ms=now_ms, run=run, boundary=boundary, reason="over")


def _undecided(found: _Found, plan: Plan, *, decides: bool) -> tuple[str, ...]:
    """The slices with late events that this plan leaves to the next one, and that the next one would not find.

    Late events are counted once, and the next plan reads only recent days by itself. So it gets the names of these
    older slices. A plan for a request (``decides`` is False) decides only about its own slices, and leaves all others.
    Every plan leaves slices that wait for `ingest`, and slices beyond the number that one run takes.
    """
    inputs, surveyed, last = found.snapshot.inputs, found.survey, found.snapshot.counted_before
    names = {*inputs.late, *(last.undecided if last else ())}
    if decides:
        # The folder of a killed run tells the next plan its slices, but this plan may remove that folder. So those of
        # its slices that are still due are among the names that this function returns.
        due = {slice_.name for slice_ in (*(due.slice for due in surveyed.due), *surveyed.waiting)}
        names = {*names, *inputs.left} & due
    names -= {work.slice for work in plan.work}
    return tuple(sorted(name for name in names if day_of_slice(name) not in (inputs.days or ())))


def _write_lines(ledger: Ledger, found: _Found, plan: Plan, *, decides: bool) -> None:
    """Write boundaries, then closed or reopened slices, then slices that are being recomputed.

    ``decides``: False if the plan is for a request. True if it decides about every slice that may be due.
    """
    inputs, now_ms, counted = found.snapshot.inputs, found.snapshot.inputs.now_ms, found.snapshot.counted
    bounded = {
        slice_.name: _bounded(slice_, boundary, inputs.entries.get(slice_.name), plan.run, now_ms)
        for slice_, boundary in found.survey.taken.items()
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
        plan.line(work, State.REOPENED if work.version else State.CLOSED, at_ms=now_ms, late=work.late)
        for work in plan.work
    ]
    begun = [replace(line, in_time=in_time_of(inputs, line.slice)) for line in begun]
    if counted:
        counted = replace(counted, undecided=_undecided(found, plan, decides=decides))
    ledger.append([*begun, *late], counted=counted)
    ledger.append(plan.line(work, State.RECOMPUTING, at_ms=now_ms) for work in plan.work)
