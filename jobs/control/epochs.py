"""The life of a streaming job's drivers as plain data: heartbeats, stop requests, receipts, states.

Pure functions give the state and a supervisor's next step; `folder.py` reads and writes the documents. An epoch is the
life of one driver, from the moment its lease is taken until its receipt is written.
"""

import os
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import psutil

BEAT_SECONDS = 2.0
# A holder counts as dead if its last heartbeat is this old, and if no new one comes during LOOK_ON_SECONDS. With a look
# every second, a killed driver is noticed within ten seconds of its last heartbeat.
STALE_SECONDS = 6.5
LOOK_ON_SECONDS = 2.5
DEAD_SECONDS = 10.0
# How long a launched driver may take until its own first heartbeat. A JVM and Python start in that time, perhaps on a
# busy machine. The time counts from the heartbeat that Airflow writes for the driver after the start of its process. If
# there is none, it counts from the moment when Airflow took the lease.
LAUNCH_SECONDS = 300.0
# The time allowed from the driver's own first heartbeat to its first query.
START_SECONDS = 600.0
# A driver that ran this long was healthy, so its failure begins a new series of failures.
WELL_SECONDS = 600.0
# How long a driver may take for the micro-batch under way after a request to stop.
STOP_SECONDS = 120.0
LOOP_FAILURES = 5
FIRST_BACKOFF_SECONDS = 5.0
LONGEST_BACKOFF_SECONDS = 300.0
# Two readings of the same start may differ by this much, because the clock may be corrected between them.
_SAME_START_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that holds a lease. Its start time distinguishes it from a later process with the same id.

    ``started_seconds`` counts from the boot of the machine, so a change of the clock does not move it.
    """

    host: str
    pid: int
    started_seconds: float
    pid_namespace: int = 0

    @classmethod
    def of(cls, pid: int) -> "Owner":
        """A process of this machine."""
        started = _started_seconds(psutil.Process(pid))
        return cls(host=socket.gethostname(), pid=pid, started_seconds=started, pid_namespace=_pid_namespace())

    @classmethod
    def this_process(cls) -> "Owner":
        """The calling process."""
        return cls.of(os.getpid())

    def is_gone(self) -> bool:
        """Whether it has certainly ended. This is visible only on the same machine, in the same PID namespace."""
        if (self.host, self.pid_namespace) != (socket.gethostname(), _pid_namespace()):
            return False
        try:
            process = psutil.Process(self.pid)
            other = abs(_started_seconds(process) - self.started_seconds) > _SAME_START_SECONDS
            return other or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


def _started_seconds(process: psutil.Process) -> float:
    return float(process.create_time() - psutil.boot_time())


def _pid_namespace() -> int:
    """The PID namespace. It distinguishes containers that share a host name but do not see each other's processes."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class Phase(StrEnum):
    """The phase in a driver's heartbeat; its launcher writes ``launched`` until the driver writes its own."""

    LAUNCHED = "launched"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


@dataclass(frozen=True, kw_only=True)
class QueryProgress:
    """One query of a driver after its last batch. ``stepped`` is the time of its last sign of progress."""

    topic: str
    stepped: float
    batch: int | None = None
    rows: int = 0
    rows_per_second: float = 0.0
    batch_seconds: float = 0.0
    lag: int | None = None
    watermark: str | None = None


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The newest heartbeat of an epoch; ``stall_seconds`` is how long a query may go without a step."""

    time: float
    owner: Owner
    phase: Phase
    stall_seconds: float = 180.0
    log: str | None = None
    ui: str | None = None
    queries: tuple[QueryProgress, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A request to end after the micro-batch under way; with ``drain``, first to read all records that wait now.

    Without ``drain``, a driver that has not ended after ``seconds`` is killed. With ``drain``, it stops reading after
    ``seconds``, even if records are left. If it has not ended `STOP_SECONDS` later, it is killed.
    """

    time: float
    by: str
    seconds: float = STOP_SECONDS
    drain: bool = False

    @property
    def patience_seconds(self) -> float:
        """How long the driver may still run after it has seen the request."""
        return self.seconds + (STOP_SECONDS if self.drain else 0.0)


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """How an epoch ended. Its driver writes it, or the process that found the driver dead."""

    time: float
    clean: bool
    cause: str
    batches: dict[str, int] | None = None
    offsets: dict[str, dict[int, int]] | None = None


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """The documents of one epoch. ``owner`` is the process that took the lease: the driver, or its launcher."""

    number: int
    taken: float
    owner: Owner | None = None
    launched: bool = False
    beat: Beat | None = None
    stop: Stop | None = None
    receipt: Receipt | None = None

    @property
    def holder(self) -> Owner | None:
        """The running process, by the newest heartbeat, else by the lease."""
        return self.beat.owner if self.beat else self.owner

    @property
    def phase(self) -> Phase:
        """The phase in its newest heartbeat; without a heartbeat, the lease decides it."""
        if self.beat:
            return self.beat.phase
        return Phase.LAUNCHED if self.launched else Phase.STARTING

    @property
    def is_launch(self) -> bool:
        """Whether it was launched and its driver has not written its own first heartbeat yet."""
        return self.phase is Phase.LAUNCHED

    @property
    def last_sign(self) -> float:
        """The time of its newest heartbeat, or of its lease if there is no heartbeat."""
        return self.beat.time if self.beat else self.taken

    @property
    def queries(self) -> tuple[QueryProgress, ...]:
        """The queries in its newest heartbeat."""
        return self.beat.queries if self.beat else ()

    @property
    def log(self) -> str | None:
        """The path of its log, if a heartbeat names it."""
        return self.beat.log if self.beat else None

    @property
    def lag(self) -> int | None:
        """How many records wait, summed over the queries that report it."""
        known = [query.lag for query in self.queries if query.lag is not None]
        return sum(known) if known else None


class Health(StrEnum):
    """The state of an epoch. A stream has the state of its newest epoch."""

    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    DEAD = "dead"

    @property
    def alive(self) -> bool:
        """Whether a driver holds the lease."""
        return self in (Health.STARTING, Health.RUNNING, Health.STALLED, Health.STOPPING)


def health(epoch: Epoch, now: float, *, gone: bool = False) -> Health:
    """The state of an epoch; ``gone`` means that its process has certainly ended.

    A last sign in the future counts as one equally far in the past, because clocks differ and are corrected. Example: a
    heartbeat whose time is 3 s ahead of ``now`` counts as 3 s old.
    """
    if epoch.receipt:
        return Health.STOPPED if epoch.receipt.clean else Health.FAILED
    if gone or abs(now - epoch.last_sign) > (LAUNCH_SECONDS if epoch.is_launch else STALE_SECONDS):
        return Health.DEAD
    if epoch.stop or epoch.phase is Phase.STOPPING:
        return Health.STOPPING
    if epoch.phase is not Phase.RUNNING:
        return Health.STARTING
    return Health.STALLED if stalled_queries(epoch, now) else Health.RUNNING


def stalled_queries(epoch: Epoch, now: float) -> list[QueryProgress]:
    """The queries that have made no progress for too long."""
    beat = epoch.beat
    return [query for query in beat.queries if now - query.stepped > beat.stall_seconds] if beat else []


def failures(history: Sequence[Epoch]) -> int:
    """How many ended epochs failed in a row, up to the newest. The failure of a healthy driver begins a new series."""
    count = 0
    for epoch in reversed(history):
        if epoch.receipt is None:
            continue
        if epoch.receipt.clean:
            break
        count += 1
        if epoch.last_sign - epoch.taken >= WELL_SECONDS:
            break
    return count


def backoff_seconds(failed: int, seed: str) -> float:
    """How long to wait after so many failures. It doubles each time, and ``seed`` varies it so that jobs spread out."""
    if not failed:
        return 0.0
    longest = min(FIRST_BACKOFF_SECONDS * 2.0 ** (failed - 1), LONGEST_BACKOFF_SECONDS)
    return longest * random.Random(seed).uniform(0.5, 1.0)


@dataclass(frozen=True)
class Attach:
    """A driver runs: follow it."""

    epoch: int


@dataclass(frozen=True)
class Wait:
    """The last driver failed: start none before this moment."""

    until: float
    failures: int


@dataclass(frozen=True)
class Launch:
    """No driver runs, and one may start now."""


def next_step(history: Sequence[Epoch], now: float, *, job: str, gone: bool = False) -> Attach | Wait | Launch:
    """Choose a supervisor's next step from the epochs, newest last; ``gone``: the newest one's process has ended."""
    if not history:
        return Launch()
    newest = history[-1]
    if health(newest, now, gone=gone).alive:
        return Attach(newest.number)
    failed = failures(history)
    ended = newest.receipt.time if newest.receipt else newest.last_sign
    wait = backoff_seconds(failed, f"{job} {newest.number}")
    # An end in the future was written by another clock, and delays nothing.
    return Wait(ended + wait, failed) if ended <= now < ended + wait else Launch()
