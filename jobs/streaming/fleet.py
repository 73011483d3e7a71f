"""All streaming jobs together: show their states, and start, stop or restart them.

A stream is wanted if its DAG in Airflow is not paused. The control folder has the stream's real state. To stop a
stream, its DAG is paused first; only then its driver is asked to end.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from jobs.airflow_api.client import AirflowApi
from jobs.control.epochs import STOP_SECONDS, Epoch, Health, Stop, Wait, failures
from jobs.control.folder import Control, death_of
from jobs.control.incident import crash_loop_key, failed_run_key, full_disk_key, stalled_key
from jobs.control.incidents import Incidents
from jobs.pipelines import STREAMS
from jobs.pipelines.layout import dag_id_of
from jobs.query.answers import visible_lines
from jobs.refusal import Refusal
from jobs.storage.folders import Folder
from jobs.times import utc

DRAIN_SECONDS = 3600.0
# A driver that was asked to end kills itself at its own limit. A stop waits this much longer for its end.
_MARGIN_SECONDS = 30.0
_START_SECONDS = 240.0
_POLL_SECONDS = 0.5

Report = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """One row of `tideline streams status`. ``wanted`` is None without Airflow, which decides it."""

    job: str
    state: str
    wanted: bool | None
    epoch: int | None = None
    since: float | None = None
    beat_seconds: float | None = None
    batch: int | None = None
    rows_per_second: float | None = None
    lag: int | None = None
    failures: int = 0
    cause: str = ""
    ui: str | None = None
    log: str | None = None

    @property
    def lives(self) -> bool:
        """Whether a driver holds its lease."""
        return self.state in {health.value for health in Health if health.alive}

    @property
    def is_well(self) -> bool:
        """Whether the stream is healthy: it runs, or it is not wanted."""
        if self.wanted is None:
            return self.state not in (Health.FAILED, Health.DEAD, Health.STALLED)
        return self.state in (Health.RUNNING, Health.STARTING) or not self.wanted


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The streaming jobs of a lake, and the Airflow that runs them. Without Airflow, drivers can only be stopped."""

    lake_root: Folder
    api: AirflowApi | None
    report: Report = lambda line: None

    def status(self, jobs: Iterable[str] = STREAMS) -> list[StreamState]:
        """The state of each job."""
        dags = self.api.dags(dag_id_of("%")) if self.api else {}
        return [self._state(job, dags.get(dag_id_of(job))) for job in jobs]

    def stop(self, jobs: Sequence[str], *, by: str, drain: bool = False, seconds: float | None = None) -> None:
        """Pause the DAGs, so that they start no job again; ask the drivers to end, and wait until they have ended."""
        for job in jobs:
            if self.api:
                self.api.pause(dag_id_of(job))
        patience = seconds or (DRAIN_SECONDS if drain else STOP_SECONDS)
        asked = self._end(jobs, Stop(time=time.time(), by=by, seconds=patience, drain=drain))
        for job in jobs:
            if self.api:
                # Airflow never ends the run of a paused DAG by itself, and starts no task in it.
                self.api.end_runs(dag_id_of(job), "success", f"stopped by {by}")
            if job not in asked:
                self.report(f"{job}: no driver runs")
            for key in (crash_loop_key(job), stalled_key(job), failed_run_key(dag_id_of(job))):
                Incidents.of(self.lake_root).close(key, f"switched off by {by}")

    def start(self, jobs: Sequence[str], *, by: str) -> None:
        """Unpause the DAGs. A job that waits after failures is started at once."""
        self._begin(self._airflow("start"), jobs, by)

    def restart(self, jobs: Sequence[str], *, by: str, seconds: float | None = None) -> None:
        """Let the drivers end after their micro-batch; new ones go on from there. A stream that is off stays off."""
        api = self._airflow("restart")
        off = [state.job for state in self.status(jobs) if not state.wanted and not state.lives]
        for job in off:
            self.report(f"{job}: is switched off, so it is not restarted")
        jobs = [job for job in jobs if job not in off]
        self._end(jobs, Stop(time=time.time(), by=by, seconds=seconds or STOP_SECONDS))
        self._begin(api, jobs, by)

    def _control(self, job: str) -> Control:
        return Control.of(self.lake_root, job)

    def _airflow(self, action: str) -> AirflowApi:
        if self.api is None:
            raise Refusal(
                f"Airflow does not answer, and only Airflow starts drivers: run `tideline up`, then {action} again"
            )
        return self.api

    def _begin(self, api: AirflowApi, jobs: Sequence[str], by: str) -> None:
        before = {job: self._forgive(job, by) for job in jobs}
        for job in jobs:
            api.unpause(dag_id_of(job))
        for job in jobs:
            self._await_start(job, before[job])

    def _end(self, jobs: Sequence[str], stop: Stop) -> dict[str, int]:
        """Ask every running driver to end, and wait until they have; returns the epochs that were asked."""
        asked = {}
        for job in jobs:
            control = self._control(job)
            epoch = control.newest_epoch()
            if epoch and control.health(epoch).alive:
                control.ask_to_stop(epoch.number, stop)
                asked[job] = epoch.number
                self.report(f"{job}: epoch {epoch.number} is asked to {'drain and stop' if stop.drain else 'stop'}")
        for job, number in asked.items():
            self._await_end(job, number, stop.patience_seconds + _MARGIN_SECONDS)
        return asked

    def _await_end(self, job: str, epoch: int, seconds: float) -> None:
        control, deadline = self._control(job), time.monotonic() + seconds
        while control.health(known := control.epoch(epoch)).alive:
            if time.monotonic() > deadline:
                raise Refusal(f"{job}: epoch {epoch} did not end within {seconds:.0f} s: see its log {known.log}")
            time.sleep(_POLL_SECONDS)
        control.write_missing_receipt()
        receipt = control.epoch(epoch).receipt
        self.report(f"{job}: epoch {epoch}: {receipt.cause if receipt else 'ended without a receipt'}")

    def _await_start(self, job: str, before: int) -> None:
        """Wait until a driver has finished its start; refuse if it failed or takes too long."""
        control, deadline = self._control(job), time.monotonic() + _START_SECONDS
        while (newest := control.newest()) <= before or control.health(control.epoch(newest)) is Health.STARTING:
            if before and newest == before and control.health(control.epoch(before)).alive:
                break
            if time.monotonic() > deadline:
                why = "; ".join(self.incidents(())) or f"look at {dag_id_of(job)} in Airflow"
                raise Refusal(f"{job}: no driver runs after {_START_SECONDS:.0f} s: {why}")
            time.sleep(_POLL_SECONDS)
        epoch = control.epoch(newest)
        health = control.health(epoch)
        if not health.alive:
            cause = epoch.receipt.cause if epoch.receipt else "it ended without a receipt"
            raise Refusal(f"{job}: epoch {newest} is {health}: {cause}")
        self.report(f"{job}: epoch {newest} is {health}")

    def _forgive(self, job: str, by: str) -> int:
        """Let the job start at once despite its failures. Return the newest epoch; the next start has a later one."""
        control = self._control(job)
        if isinstance(control.next_step(), Wait):
            # This is refused if the job was started meanwhile: then it does not wait any more.
            with suppress(Refusal):
                control.reset_failures(by)
                self.report(f"{job}: its earlier failures do not count any more")
        return control.newest()

    def _state(self, job: str, dag: dict[str, Any] | None) -> StreamState:
        control = self._control(job)
        history = control.history()
        wanted = None if dag is None else not dag["is_paused"]
        if not history:
            return StreamState(job=job, state="never started", wanted=wanted)
        epoch = history[-1]
        health, beat = control.health(epoch), epoch.beat
        batches = [query.batch for query in epoch.queries if query.batch is not None]
        return StreamState(
            job=job,
            state=health,
            wanted=wanted,
            epoch=epoch.number,
            since=epoch.receipt.time if epoch.receipt else epoch.taken,
            beat_seconds=time.time() - epoch.last_sign if health.alive else None,
            batch=max(batches, default=None),
            rows_per_second=sum(query.rows_per_second for query in beat.queries) if beat and health.alive else None,
            lag=epoch.lag if health.alive else None,
            failures=failures(history),
            cause=_cause(epoch, job, health, wanted),
            ui=beat.ui if beat and health.alive else None,
            log=epoch.log,
        )

    def incidents(self, jobs: Iterable[str] = STREAMS) -> list[str]:
        """The texts of the jobs' open incidents, and of a full disk, which stops all jobs."""
        prefixes = [full_disk_key(), *(f"stream.{job}." for job in jobs)]
        return [incident.text for incident in Incidents.of(self.lake_root).still_open(*prefixes)]


def _cause(epoch: Epoch, job: str, health: Health, wanted: bool | None) -> str:
    """Why the stream is in its state, or a warning that its driver runs while its DAG is paused."""
    if health is Health.DEAD:
        return death_of(epoch)
    if health.alive and wanted is False:
        return (
            "its DAG is paused: the driver goes on, but Airflow would not restart it; to end it: "
            f"tideline streams stop {job}"
        )
    return epoch.receipt.cause if epoch.receipt else ""


def known_jobs(jobs: Sequence[str]) -> tuple[str, ...]:
    """The named jobs, or all jobs if no name is given; a `Refusal` for an unknown name."""
    unknown = [job for job in jobs if job not in STREAMS]
    if unknown:
        raise Refusal(f"no streaming job is called {', '.join(unknown)}: choose from {', '.join(STREAMS)}")
    return tuple(dict.fromkeys(jobs)) or STREAMS


def as_rows(states: Iterable[StreamState]) -> list[dict[str, Any]]:
    """The states as rows, for programs."""
    return [asdict(state) for state in states]


def table(states: Iterable[StreamState]) -> Table:
    """The states as a table, for people."""
    shown = Table("stream", "wanted", "state", "epoch", "since (UTC)", "batch", "rows/s", "lag", "why")
    for state in states:
        since = utc(state.since) if state.since else ""
        shown.add_row(
            state.job,
            {True: "on", False: "off", None: "?"}[state.wanted],
            state.state,
            _text(state.epoch),
            since,
            _text(state.batch),
            _text(state.rows_per_second),
            _text(state.lag),
            # It may quote data, so control characters are made visible, and brackets are not read as markup.
            Text(visible_lines(state.cause)),
        )
    return shown


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}"
