"""The whole stack: start it in order, check each part, repair it after a crash, and end all its processes."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import psutil

from jobs.airflow_api.client import AirflowApi
from jobs.refusal import Refusal
from local.jars import classes
from local.jars import fetch as jars
from local.jars.java import find_java
from local.jars.lock import one_at_a_time
from local.platform import doctor
from local.platform.airflow import COMPONENTS, Airflow
from local.platform.broker import STOP_SECONDS as BROKER_STOP_SECONDS
from local.platform.broker import Broker
from local.platform.database import shrink
from local.platform.drivers import end_drivers, is_job
from local.platform.process import Service, kill, marked, session_of, terminate, wait_gone
from local.platform.settings import StackSettings
from local.steps import Report, silent

JOBS = "jobs"
_PARTS = ("broker", *COMPONENTS)
_START_SECONDS = 180
# A component that runs but sends no heartbeat for this long hangs, and is replaced.
_HANG_SECONDS = 30
_DRIVERS_STOP_SECONDS = 45
_SCHEDULER_STOP_SECONDS = 15
# The components lose nothing when they are killed, and the triggerer alone would take ten seconds to end.
_COMPONENTS_STOP_SECONDS = 5
_OWN_FOLDERS = ("lake", "broker", "airflow", "logs", "run", "scratch")


@dataclass(frozen=True, kw_only=True)
class PartState:
    """One row of `tideline status`. Memory is PSS: pages that processes share are counted only once."""

    name: str
    state: str
    pid: int | None
    started: datetime | None
    processes: int
    memory_bytes: int

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with the part. Nothing is wrong if no job runs."""
        return self.name == JOBS or self.state == "healthy"


@dataclass(frozen=True)
class Stack:
    """Broker and Airflow below one home."""

    settings: StackSettings
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)

    @cached_property
    def broker(self) -> Broker:
        """The Kafka broker."""
        settings = self.settings
        return Broker(
            home=settings.home,
            port=settings.kafka_port,
            controller_port=settings.kafka_controller_port,
            heap_mb=settings.kafka_heap_mb,
            jars=settings.jobs.jars / "broker",
            env=self.env,
        )

    @cached_property
    def airflow(self) -> Airflow:
        """Airflow and its components."""
        return Airflow(settings=self.settings, java=find_java(self.env), env=self.env)

    def up(self, report: Report = silent) -> None:
        """Start the parts that do not run, and replace those that hang. If all is well, nothing changes."""
        report("checks of this machine and of the jars", "about a second")
        doctor.preflight(self.settings)
        with one_at_a_time(self._lock):
            kill(self._strays())
            jars.fetch(self.settings.jobs.jars, mirror=self.settings.maven_url, report=report)
            classes.prepare(self.settings.jobs.jars, report=report)
            report("broker", "about 5 s")
            self.broker.start()
            report("Airflow's database", "the first time about 10 s")
            self.airflow.prepare()
            self._start_components(report)

    def down(self, report: Report = silent) -> int:
        """End everything, in order first. Return the number of processes that had to be killed."""
        with one_at_a_time(self._lock):
            report("Spark drivers and the scheduler", "at most a minute")
            self._stop_work()
            report("Airflow", "at most 5 s")
            self._stop_components()
            report("broker", "at most 20 s")
            self._service("broker").stop(BROKER_STOP_SECONDS)
            left = marked(self.settings.home)
            kill(left)
            return len(left)

    def status(self) -> list[PartState]:
        """Every part, with its state, its processes and its memory."""
        members = self._members()
        health = self._health()
        return [self._state(name, members.get(name, []), health) for name in (*_PARTS, JOBS)]

    @contextmanager
    def running_api(self) -> Iterator[AirflowApi | None]:
        """Airflow's API, or none if it does not run."""
        if self._service("api-server").process() is None:
            yield None
            return
        with self.airflow.api() as api:
            yield api if api.health() else None

    def clean(self) -> list[Path]:
        """Delete data, logs and Airflow's database, but not the jars. Refused while something runs."""
        if marked(self.settings.home):
            raise Refusal("the platform runs: stop it first, with `tideline down`")
        found = [folder for name in _OWN_FOLDERS if (folder := self.settings.home / name).exists()]
        for folder in found:
            shutil.rmtree(folder)
        return found

    @property
    def _lock(self) -> Path:
        return self.settings.home / "run" / ".lock"

    def _service(self, name: str) -> Service:
        """A part by its name, without its command. It can be found and ended, also if Java was removed."""
        return Service(name=name, home=self.settings.home, command=())

    def _start_components(self, report: Report) -> None:
        services = self.airflow.services()
        fresh = {name for name, service in services.items() if service.process() is None}
        if fresh == services.keys():
            shrink(self.airflow.database)
        for name in fresh - {"scheduler"}:
            services[name].start()
        for name, service in services.items():
            report(f"Airflow's {name}", "all of Airflow: about 10 s")
            if name in fresh & {"scheduler"}:
                service.start()
            self._await(name, service, fresh=name in fresh)

    def _await(self, name: str, service: Service, *, fresh: bool) -> None:
        if not fresh:
            with suppress(Refusal):
                return service.wait_ready(lambda: self._beats(name, service), _HANG_SECONDS)
            service.start()
        return service.wait_ready(lambda: self._beats(name, service), _START_SECONDS)

    def _beats(self, name: str, service: Service) -> bool:
        process = service.process()
        if process is None:
            return False
        with self.airflow.api() as api:
            if name == "api-server":
                return bool(api.health())
            return api.beats_since(COMPONENTS[name][1], datetime.fromtimestamp(process.create_time(), UTC))

    def _stop_work(self) -> None:
        """Stop the scheduler, which waits for running tasks, and the drivers, which end between two batches."""
        scheduler = self._service("scheduler").process()
        terminate([scheduler] if scheduler else [])
        end_drivers(lambda: marked(self.settings.home), _DRIVERS_STOP_SECONDS)
        self._service("scheduler").stop(_SCHEDULER_STOP_SECONDS)

    def _stop_components(self) -> None:
        services = [self._service(name) for name in reversed(COMPONENTS)]
        living = [process for service in services if (process := service.process())]
        terminate(living)
        wait_gone(living, _COMPONENTS_STOP_SECONDS)
        for service in services:
            service.kill()

    def _strays(self) -> list[psutil.Process]:
        """Processes of the stack that belong to no part, e.g. after a pid file was lost. Jobs are not included."""
        sessions = {self._service(name).session() for name in _PARTS}
        return [p for p in marked(self.settings.home) if session_of(p) not in sessions and not is_job(p)]

    def _members(self) -> dict[str, list[psutil.Process]]:
        """Every process of the stack by the part it belongs to."""
        leaders = {self._service(name).session(): name for name in _PARTS}
        members: dict[str, list[psutil.Process]] = {}
        for process in marked(self.settings.home):
            part = JOBS if is_job(process) else leaders.get(session_of(process), JOBS)
            members.setdefault(part, []).append(process)
        return members

    def _health(self) -> dict[str, str]:
        """The health of Airflow's parts, as Airflow reports it."""
        if self._service("api-server").process() is None:
            return {}
        with self.airflow.api() as api:
            return {name: str(part.get("status")) for name, part in api.health().items()}

    def _state(self, name: str, members: list[psutil.Process], health: Mapping[str, str]) -> PartState:
        leader = None if name == JOBS else self._service(name).process()
        return PartState(
            name=name,
            state=self._word(name, leader is not None, health) if name != JOBS else ("running" if members else "none"),
            pid=leader.pid if leader else None,
            started=datetime.fromtimestamp(leader.create_time(), UTC) if leader else None,
            processes=len(members),
            memory_bytes=sum(_pss_bytes(process) for process in members),
        )

    def _word(self, name: str, lives: bool, health: Mapping[str, str]) -> str:
        if not lives:
            return "stopped"
        healthy = self.broker.healthy() if name == "broker" else health.get(COMPONENTS[name][1]) == "healthy"
        return "healthy" if healthy else "unhealthy"


def _pss_bytes(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        memory = process.memory_full_info()
        return int(getattr(memory, "pss", memory.uss))
    return 0
