"""A process of the stack: started in its own session, found again by its pid file, ended with its whole session.

Every process has `TIDELINE_STACK=<home>` in its environment, and its children inherit it. So every process of the
stack can be found, also after a crash.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from jobs.refusal import Refusal

MARKER = "TIDELINE_STACK"
_LOG_LIMIT_BYTES = 20_000_000
# A trace of Java is about this long.
_LOG_LINES = 30
# If the clock is corrected, two readings of the start of one process differ a little.
_SAME_START_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Service:
    """A command to run as a process. Its pid file and its log are in the stack's home."""

    name: str
    home: Path
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def log(self) -> Path:
        """The file with everything that it writes to stdout and stderr."""
        return self.home / "logs" / f"{self.name}.log"

    @property
    def _pid_file(self) -> Path:
        return self.home / "run" / f"{self.name}.pid"

    def start(self) -> None:
        """Start it, detached from this process. Processes that an earlier crash left are killed first."""
        self.kill()
        for folder in (self.log.parent, self._pid_file.parent):
            folder.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > _LOG_LIMIT_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        output = (os.POSIX_SPAWN_OPEN, 1, self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        files = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), output, (os.POSIX_SPAWN_DUP2, 1, 2)]
        # Airflow's processes rename themselves. By default they would overwrite their environment, and so the mark.
        env = {**self.env, MARKER: str(self.home), "SPT_NOENV": "1"}
        pid = os.posix_spawnp(self.command[0], self.command, env, setsid=True, file_actions=files)
        record = {"pid": pid, "started": psutil.Process(pid).create_time()}
        self._pid_file.with_suffix(".new").write_text(json.dumps(record))
        self._pid_file.with_suffix(".new").replace(self._pid_file)

    def process(self) -> psutil.Process | None:
        """The running process of the pid file; none if the file is stale or the pid belongs to another process."""
        record = self._record()
        if record is None:
            return None
        with suppress(psutil.Error):
            process = psutil.Process(record["pid"])
            same = abs(process.create_time() - record["started"]) < _SAME_START_SECONDS
            return process if same and is_alive(process) else None
        return None

    def session(self) -> int | None:
        """The pid of its last start. Its children keep this pid as their session after the process has ended."""
        record = self._record()
        return record["pid"] if record else None

    def stop(self, grace_seconds: float) -> None:
        """Ask it to end, wait, then kill the rest of its session."""
        process = self.process()
        if process:
            terminate([process])
            wait_gone([process], grace_seconds)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to its whole session, and return when all of these processes are gone."""
        if session := self.session():
            kill_session(session, marked(self.home))
        self._pid_file.unlink(missing_ok=True)

    def wait_ready(self, ready: Callable[[], bool], deadline_seconds: float) -> None:
        """Wait until the check holds; refuse with the log's last lines when the process ends or time is up."""
        deadline = time.monotonic() + deadline_seconds
        while not ready():
            if self.process() is None:
                raise self._refusal("ended while starting")
            if time.monotonic() > deadline:
                raise self._refusal(f"was not ready after {deadline_seconds:.0f} s")
            time.sleep(0.2)

    def _record(self) -> dict[str, int] | None:
        try:
            record = json.loads(self._pid_file.read_text())
            return {"pid": record["pid"], "started": record["started"]}
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _refusal(self, what: str) -> Refusal:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        tail = "".join(f"\n    {line}" for line in lines[-_LOG_LINES:])
        return Refusal(f"{self.name} {what}: its log ({self.log}) gives the cause: correct that and start again{tail}")


def marked(home: Path) -> list[psutil.Process]:
    """Every running process of this stack, however it was started, except this process and its parents."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [process for process in psutil.process_iter() if process.pid not in own and _bears(process, home)]


def terminate(processes: Iterable[psutil.Process]) -> None:
    """Send SIGTERM, a request to end."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)


def kill(processes: Collection[psutil.Process]) -> None:
    """Send SIGKILL, and wait until the processes are gone."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    wait_gone(processes, 10)


def kill_session(session: int, living: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to the processes of a session, also if its leader has ended."""
    kill([process for process in living if session_of(process) == session])


def wait_gone(processes: Collection[psutil.Process], seconds: float) -> bool:
    """Whether all of them ended in time. Children of this process are reaped."""
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs. A process that has ended but is not yet reaped does not count."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _bears(process: psutil.Process, home: Path) -> bool:
    with suppress(psutil.Error):
        return process.environ().get(MARKER) == str(home) and is_alive(process)
    return False


def session_of(process: psutil.Process) -> int | None:
    """The pid of the service that it belongs to; none if it has just ended."""
    with suppress(OSError):
        return os.getsid(process.pid)
    return None
