"""What is known of a streaming job's drivers, and what follows from it. Pure: nothing is read or written here.

An epoch is the life of one driver, from the moment its lease is taken until its receipt says how it ended.
"""

import os
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import psutil

BEAT_SECONDS = 2.0
# A holder that has not shown itself for so long is taken for dead, if it does not show itself while one looks on. With
# that, and a look every second, a death is noticed within ten seconds of the last heartbeat.
STALE_SECONDS = 6.5
LOOK_ON_SECONDS = 2.5
DEAD_SECONDS = 10.0
# From the lease that Airflow takes to the driver's first own beat: a JVM and a Python start on a busy machine.
LAUNCH_SECONDS = 300.0
# From then to its first query.
START_SECONDS = 600.0
# A driver that lived this long was well: its failure begins a new series.
WELL_SECONDS = 600.0
# How long a driver that is asked to stop may take for the micro-batch under way.
STOP_SECONDS = 120.0
LOOP_FAILURES = 5
FIRST_BACKOFF_SECONDS = 5.0
LONGEST_BACKOFF_SECONDS = 300.0
# Two readings of one process's start differ by the clock's corrections between two looks at the clock.
_SAME_START_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that holds a lease; its start time tells it from a later process with the same id.

    ``started_seconds`` counts from the boot of the machine: a clock that is set anew does not move it.
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
        """The process that asks."""
        return cls.of(os.getpid())

    def is_gone(self) -> bool:
        """True if it is known to be dead: only a process of this machine, as this process sees it, can be."""
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
    """Containers may share a host name and not see each other's processes."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class Phase(StrEnum):
    """What a driver says of itself; ``launched`` is said for it, until it speaks."""

    LAUNCHED = "launched"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


@dataclass(frozen=True, kw_only=True)
class QueryProgress:
    """One query of a driver after its last batch. ``stepped`` is when it last showed that it goes on."""

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
    """A request to end after the micro-batch under way, or first when what waits now is read (``drain``).

    ``seconds`` is how long the driver may take: then it ends hard, but one that drains stops undrained.
    """

    time: float
    by: str
    seconds: float = STOP_SECONDS
    drain: bool = False

    @property
    def patience_seconds(self) -> float:
        """How long after it has seen this the driver may still be there."""
        return self.seconds + (STOP_SECONDS if self.drain else 0.0)


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """How an epoch ended, said by its driver or by the one who found it dead."""

    time: float
    clean: bool
    cause: str
    batches: dict[str, int] | None = None
    offsets: dict[str, dict[int, int]] | None = None


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """All that is known of one epoch; ``owner`` is the process that took the lease: the driver, or who launches it."""

    number: int
    taken: float
    owner: Owner | None = None
    launched: bool = False
    beat: Beat | None = None
    stop: Stop | None = None
    receipt: Receipt | None = None

    @property
    def holder(self) -> Owner | None:
        """The process that runs, as far as it is known."""
        return self.beat.owner if self.beat else self.owner

    @property
    def phase(self) -> Phase:
        """What it says of itself, or what the lease alone tells."""
        if self.beat:
            return self.beat.phase
        return Phase.LAUNCHED if self.launched else Phase.STARTING

    @property
    def is_launch(self) -> bool:
        """Whether its driver has yet to speak for the first time."""
        return self.phase is Phase.LAUNCHED

    @property
    def last_sign(self) -> float:
        """When somebody last showed that it lives."""
        return self.beat.time if self.beat else self.taken

    @property
    def queries(self) -> tuple[QueryProgress, ...]:
        """What it last said of its queries."""
        return self.beat.queries if self.beat else ()

    @property
    def log(self) -> str | None:
        """Where its log is, if it has said so."""
        return self.beat.log if self.beat else None

    @property
    def lag(self) -> int | None:
        """How many records wait, over all queries that know."""
        known = [query.lag for query in self.queries if query.lag is not None]
        return sum(known) if known else None


class Health(StrEnum):
    """The state of an epoch, and so of a stream: that of its newest."""

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
    """How an epoch does; ``gone`` says that its process is known to have ended.

    A last sign from the future is as old as one from the past: clocks differ, and are set anew.
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
    """Those that have not made a step for too long."""
    beat = epoch.beat
    return [query for query in beat.queries if now - query.stepped > beat.stall_seconds] if beat else []


def failures(history: Sequence[Epoch]) -> int:
    """How many epochs in a row, up to the newest that has ended, failed before they were well."""
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
    """How long to wait after so many failures: doubled each time, and spread so that jobs do not start together."""
    if not failed:
        return 0.0
    longest = min(FIRST_BACKOFF_SECONDS * 2.0 ** (failed - 1), LONGEST_BACKOFF_SECONDS)
    return longest * random.Random(seed).uniform(0.5, 1.0)


@dataclass(frozen=True)
class Attach:
    """A driver lives: follow it."""

    epoch: int


@dataclass(frozen=True)
class Wait:
    """The last one failed: not before this moment."""

    until: float
    failures: int


@dataclass(frozen=True)
class Launch:
    """Nobody runs, and nothing speaks against a start."""


def next_step(history: Sequence[Epoch], now: float, *, job: str, gone: bool = False) -> Attach | Wait | Launch:
    """What a supervisor does next, from all epochs that are known, the newest last; ``gone`` is about the newest."""
    if not history:
        return Launch()
    newest = history[-1]
    if health(newest, now, gone=gone).alive:
        return Attach(newest.number)
    failed = failures(history)
    ended = newest.receipt.time if newest.receipt else newest.last_sign
    wait = backoff_seconds(failed, f"{job} {newest.number}")
    # An end in the future is one by another clock.
    return Wait(ended + wait, failed) if ended <= now < ended + wait else Launch()
