"""`tideline soak`: check that a platform keeps up with three pipelines that are fed, streamed and recomputed at once.

The soak starts its own platform. Every few seconds, it measures the age of each tide line and the platform's resources.
At the end, no writer may have hindered another: the streams append while slices are published.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil

from jobs.airflow_api.client import AirflowApi
from jobs.control.folder import Control
from jobs.control.incidents import Incidents
from jobs.finality.tide_line import begin_and_tide_line
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines import PIPELINES, STREAMS
from jobs.pipelines.layout import dag_id_of
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.relations import tables
from jobs.pipelines.slices import slice_at
from jobs.refusal import Refusal
from jobs.settings import Settings
from jobs.storage.folders import Folder
from jobs.streaming.fleet import Fleet
from local.demo.run import TOPICS, TRAFFIC, TRAFFIC_CONF, provision, wait_for_dags
from local.platform.ports import LOOPBACK, free_ports
from local.platform.process import marked
from local.platform.settings import StackSettings
from local.platform.stack import Stack
from local.soak import disk as soak_disk
from local.soak.samples import Faults, Sample, Soaked, conflicts
from local.steps import Report, Tell, silent

_SAMPLE_SECONDS = 10.0
# Memory is measured page by page for every process, and the disk file by file. This keeps a core busy, so it is done
# rarely.
_SAMPLES_PER_MEMORY = 6
_UPKEEP = "upkeep"
_SAMPLES_PER_UPKEEP = 60
_START_SECONDS = 600.0


class CpuMeter:
    """Measures the CPU time of processes that come and go. An ended child's time is added to its parent's."""

    def __init__(self) -> None:
        """Start without a measurement."""
        self._last: dict[int, tuple[float, int]] = {}

    def seconds_since(self, processes: Iterable[psutil.Process]) -> float:
        """CPU seconds of these processes and their ended children since the last look."""
        now: dict[int, tuple[float, int]] = {}
        for process in processes:
            with suppress(psutil.Error):
                now[process.pid] = (sum(process.cpu_times()[:4]), process.ppid())
        # The time of an ended process is now in its parent's count. The time of an ended orphan is in no count.
        before = sum(took for pid, (took, parent) in self._last.items() if pid in now or parent in now)
        self._last = now
        return max(sum(took for took, _ in now.values()) - before, 0.0)


def run(minutes: float, report: Tell, quota_mb: int | None = None) -> Soaked:
    """Run a soak. The platform is removed afterwards, and also its folder, unless something was wrong.

    ``quota_mb``: the size of a disk for the lake. That disk is always removed afterwards.
    """
    home, small = Path(tempfile.mkdtemp(prefix="tideline-soak-")), soak_disk.environment_of(quota_mb)
    with soak_disk.disk_of(home / "lake", quota_mb):
        # Airflow and the drivers get these settings only through the environment.
        stack = Stack(_settings(home, small), env={**small, **os.environ})
        clean = False
        try:
            stack.up(_steps_of(report))
            with stack.airflow.api() as api:
                _start(api, stack.settings.jobs.lake_root, report)
                soaked = _soak(stack, api, minutes, home, report, quota_mb)
            clean = not soaked.unmet()
            return soaked
        finally:
            stack.down(_steps_of(report))
            if clean:
                shutil.rmtree(home, ignore_errors=True)
            else:
                report(f"the folder of the soak is kept: {home}")


def _steps_of(report: Tell) -> Report:
    """The report of a platform that starts. A soak takes many minutes, so it does not count the seconds of a start."""
    return lambda what, expected="", /: report(what)


def _settings(home: Path, small: Mapping[str, str] | None = None) -> StackSettings:
    """The settings of a platform on free ports, without the user's settings of Kafka and Airflow.

    ``small``: the settings for a small disk. The user's settings take precedence over them.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KAFKA_", "AIRFLOW_"))}
    ports = [str(port) for port in free_ports(3)]
    own = {
        "TIDELINE_HOME": str(home),
        "LAKE_ROOT": str(home / "lake"),
        "TIDELINE_JARS": str(Settings.from_env().jars),
        "KAFKA_BOOTSTRAP": f"{LOOPBACK}:{ports[0]}",
        "KAFKA_CONTROLLER_PORT": ports[1],
        "AIRFLOW_PORT": ports[2],
    }
    return StackSettings.from_env({**(small or {}), **env, **own})


def _start(api: AirflowApi, lake_root: Folder, report: Tell) -> None:
    """Start topics, streams and traffic. Start recompute when every stream has made a micro-batch."""
    batch = [dag for p in PIPELINES.values() for dag in (p.recompute_job, p.account_job)]
    report("DAGs are read")
    wait_for_dags(api, {TOPICS, TRAFFIC, *map(dag_id_of, STREAMS), *batch}, silent, _START_SECONDS)
    report("topics")
    provision(api, _START_SECONDS)
    report("streams and traffic")
    for dag in (*map(dag_id_of, STREAMS), TRAFFIC):
        api.unpause(dag)
    api.trigger(TRAFFIC, TRAFFIC_CONF)
    fleet = Fleet(lake_root=lake_root, api=api)
    deadline = time.monotonic() + _START_SECONDS
    while waiting := [state.job for state in fleet.status() if not state.batch]:
        if time.monotonic() > deadline:
            raise Refusal(f"after {_START_SECONDS:.0f} s: no micro-batch of {', '.join(waiting)}")
        time.sleep(1)
    for dag in batch:
        api.unpause(dag)


def _soak(stack: Stack, api: AirflowApi, minutes: float, home: Path, report: Tell, quota_mb: int | None) -> Soaked:
    samples = []
    for sample in _watch(stack, api, minutes):
        ages = ", ".join(f"{name} {age:.0f} s" for name, age in sample.ages.items())
        report(f"minute {sample.seconds / 60:.1f}: {ages}; {sample.cores:.1f} cores")
        samples.append(sample)
        if len(samples) % _SAMPLES_PER_UPKEEP == 0:
            api.trigger(_UPKEEP)
    report("collecting faults")
    faults = Faults(
        conflicts=tuple(conflicts(home / "logs")),
        failed_batches=tuple(_failed_batches(stack.settings.jobs.lake_root)),
        failed_runs=tuple(_failed_runs(api)),
        incidents=tuple(f"{i.key}: {i.text}" for i in Incidents.of(stack.settings.jobs.lake_root).all()),
    )
    finals = {pipeline.name: _finals(api, pipeline) for pipeline in PIPELINES.values()}
    disk = soak_disk.Disk(
        uses=tuple((sample.seconds / 60, sample.use) for sample in samples if sample.use),
        freed=soak_disk.freed(home / "logs"),
        quota_bytes=quota_mb * 1_000_000 if quota_mb else None,
    )
    return Soaked(
        minutes=minutes, samples=tuple(samples), faults=faults, runs=_runs(api), finals=finals, disk=disk, kept=home
    )


def _watch(stack: Stack, api: AirflowApi, minutes: float) -> Iterator[Sample]:
    """Take a sample every few seconds, and the last one at the end."""
    lake_root, home = stack.settings.jobs.lake_root, stack.settings.home
    fleet, meter = Fleet(lake_root=lake_root, api=api), CpuMeter()
    meter.seconds_since(marked(home))
    psutil.cpu_percent()
    began = last = time.monotonic()
    memory, number = 0, 0
    while last - began < minutes * 60:
        number += 1
        time.sleep(max(0.0, min(began + number * _SAMPLE_SECONDS, began + minutes * 60) - time.monotonic()))
        use = None
        if number % _SAMPLES_PER_MEMORY == 1:
            memory = sum(part.memory_bytes for part in stack.status())
            use = soak_disk.look(home, tables().values())
        lines = {name: age_of_tide_line(PipelineLake(lake_root, pipeline)) for name, pipeline in PIPELINES.items()}
        states = fleet.status()
        busy, now = meter.seconds_since(marked(home)), time.monotonic()
        yield Sample(
            seconds=now - began,
            ages={name: age for name, (age, _) in lines.items()},
            final={name: count for name, (_, count) in lines.items()},
            batches={state.job: state.batch for state in states if state.batch is not None},
            lags={state.job: state.lag for state in states if state.lag is not None},
            cores=busy / (now - last),
            machine_cores=psutil.cpu_percent() / 100 * (os.cpu_count() or 1),
            memory_bytes=memory,
            use=use,
        )
        last = now


def age_of_tide_line(lake: PipelineLake) -> tuple[float, int]:
    """The age of the tide line in seconds, and the number of final slices.

    Before any slice is final, the age counts from the begin of the first slice.
    """
    pipeline, final = lake.pipeline, lake.final()
    first_ms, tide_line_ms = begin_and_tide_line(pipeline, final, lake.events())
    if first_ms is None:
        return 0.0, 0
    since_ms = slice_at(pipeline, first_ms).start_ms if tide_line_ms is None else tide_line_ms
    return time.time() - since_ms / 1000, sum(final.slices_by_day().values()) if final else 0


def _failed_batches(lake_root: Folder) -> Iterator[str]:
    """Drivers that ended with an error: a failed micro-batch ends its driver."""
    for job in STREAMS:
        for epoch in Control.of(lake_root, job).history():
            if epoch.receipt and not epoch.receipt.clean:
                yield f"{job}, epoch {epoch.number}: {epoch.receipt.cause}"


def _failed_runs(api: AirflowApi) -> Iterator[str]:
    for dag in sorted(api.dags()):
        yield from (f"{dag}: {run['dag_run_id']}" for run in api.runs(dag) if run["state"] == "failed")


def _runs(api: AirflowApi) -> dict[str, list[float]]:
    """How long the newest successful runs of each batch DAG took, from the start of their first task."""
    found = {}
    for pipeline in PIPELINES.values():
        for dag in (pipeline.recompute_job, pipeline.account_job):
            ended = [run for run in api.runs(dag) if run["state"] == "success" and run["start_date"]]
            found[dag] = [_seconds(run["start_date"], run["end_date"]) for run in ended]
    return found


def _finals(api: AirflowApi, pipeline: Pipeline) -> list[float]:
    """The seconds from plan to publish, for the newest runs that published something."""
    found = []
    for run in api.runs(pipeline.recompute_job):
        tasks = {task["task_id"]: task for task in api.task_instances(pipeline.recompute_job, run["dag_run_id"])}
        if tasks["publish"]["state"] == "success":
            found.append(_seconds(tasks["plan"]["start_date"], tasks["publish"]["end_date"]))
    return found


def _seconds(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
