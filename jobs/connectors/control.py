"""The control folder of a streaming job: who may write, whether it lives, what it is asked, and how it ended.

Each epoch has a lease, a heartbeat, a receipt, and a stop request if there was one. A lease is created once and never
changed: the newest epoch holds. So two drivers that start together cannot both win, and a driver that was overtaken
sees it by one look for the next epoch.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from jobs.connectors.documents import Documents
from jobs.connectors.epochs import (
    BEAT_SECONDS,
    LAUNCH_SECONDS,
    STALE_SECONDS,
    Attach,
    Beat,
    Epoch,
    Health,
    Launch,
    Owner,
    Phase,
    QueryProgress,
    Receipt,
    Stop,
    Wait,
    health,
    next_step,
)
from jobs.pipelines.spec import control_of
from jobs.refusal import Refusal

log = logging.getLogger(__name__)

# Set for a driver whose lease was taken by the one who started it.
EPOCH_VARIABLE = "TIDELINE_EPOCH"
LOG_VARIABLE = "TIDELINE_DRIVER_LOG"
KEPT_EPOCHS = 10
# An overtaken driver, or one past its deadline, that does not come to its end by itself is ended.
GRACE_SECONDS = 30.0
_TAIL_BYTES = 20_000
_WORDS = 500


class LeaseLostError(Refusal):
    """A newer epoch exists, or this one was declared dead: this driver must commit nothing more."""


@dataclass(frozen=True)
class Control:
    """The control folder of one job."""

    documents: Documents
    job: str

    @classmethod
    def of(cls, lake_root: Path, job: str) -> "Control":
        """The folder of a job below the lake's root."""
        return cls(Documents.at(lake_root / control_of(job)), job)

    def newest(self) -> int:
        """The epoch that holds; 0 if nobody ever did."""
        return max(self._numbers(), default=0)

    def history(self) -> list[Epoch]:
        """The last epochs, the newest last."""
        return [self.epoch(number) for number in sorted(self._numbers())]

    def epoch(self, number: int) -> Epoch:
        """All that is known of one."""
        read = self.documents.read
        # A lease that a power cut emptied was taken by nobody who is still there.
        lease = read(_name("lease", number)) or {"time": 0.0, "owner": None}
        beat, stop, receipt = (read(_name(kind, number)) for kind in ("heartbeat", "stop", "receipt"))
        return Epoch(
            number=number,
            taken=lease["time"],
            owner=Owner(**lease["owner"]) if lease["owner"] else None,
            beat=_beat(beat) if beat else None,
            stop=Stop(**stop) if stop else None,
            receipt=_receipt(receipt) if receipt else None,
        )

    def health(self, epoch: Epoch) -> Health:
        """How it does now, by all that can be known from here."""
        return health(epoch, time.time(), gone=is_gone(epoch))

    def settle(self) -> None:
        """Write the receipt of a driver that died without a word."""
        newest = self.newest()
        epoch = self.epoch(newest) if newest else None
        if epoch and self.health(epoch) is Health.DEAD:
            self.end(newest, Receipt(time=time.time(), clean=False, cause=death_of(epoch)))

    def next_step(self) -> Attach | Wait | Launch:
        """What a supervisor does now."""
        self.settle()
        history = self.history()
        gone = bool(history) and is_gone(history[-1])
        return next_step(history, time.time(), job=self.job, gone=gone)

    def forgive(self, by: str) -> None:
        """Forget the failures so far: an operator says that it may start at once. Refused while a driver lives."""
        number = self.reserve(Owner.this_process())
        self.end(number, Receipt(time=time.time(), clean=True, cause=f"failures forgotten: {by}"))

    def reserve(self, owner: Owner | None = None) -> int:
        """Take the next epoch, unless the holder of the last one lives; without an owner it is for one to come."""
        last = self.newest()
        if last:
            self._refuse_if_alive(last)
            self.settle()
        taken = {"time": time.time(), "owner": asdict(owner) if owner else None}
        created = self.documents.create(_name("lease", last + 1), taken)
        # One that slept since its look at the newest epoch may find its name free again: it was pruned.
        if not created or self.newest() > last + 1:
            raise Refusal(f"another driver of {self.job!r} started at the same moment and holds the lease")
        self._prune(last + 1 - KEPT_EPOCHS)
        return last + 1

    def _refuse_if_alive(self, number: int) -> None:
        epoch = self.epoch(number)
        if self.health(epoch).alive:
            holder = epoch.holder
            who = f"process {holder.pid} on {holder.host}" if holder else "a start under way"
            raise Refusal(
                f"stream {self.job!r} is already running: {who} holds epoch {number}, its last sign of life is "
                f"{max(0.0, time.time() - epoch.last_sign):.0f} s old; stop it first, or wait {STALE_SECONDS:.0f} s "
                "after it has died"
            )

    def claim(self, number: int, owner: Owner) -> bool:
        """Become the driver of an epoch whose lease somebody else took; False if there is one already."""
        return self.documents.create(_name("driver", number), asdict(owner))

    def beat(self, number: int, beat: Beat) -> None:
        """Show that an epoch lives."""
        self.documents.replace(_name("heartbeat", number), asdict(beat))

    def ask_to_stop(self, number: int, stop: Stop) -> None:
        """Ask the driver of an epoch to end; a later request takes the place of an earlier one."""
        self.documents.replace(_name("stop", number), asdict(stop))

    def end(self, number: int, receipt: Receipt) -> bool:
        """Say how an epoch ended; the first word counts."""
        return self.documents.create(_name("receipt", number), asdict(receipt))

    def is_over(self, number: int) -> bool:
        """Whether a newer epoch exists, or this one has its receipt."""
        successor, receipt, own = _name("lease", number + 1), _name("receipt", number), _name("lease", number)
        exists = self.documents.exists
        # One that slept long enough finds all that was said of it pruned, its own lease too.
        return exists(successor) or exists(receipt) or not exists(own)

    def stop_of(self, number: int) -> Stop | None:
        """What the driver of an epoch is asked."""
        stop = self.documents.read(_name("stop", number))
        return Stop(**stop) if stop else None

    def _numbers(self) -> list[int]:
        return [int(name.removeprefix("lease-")) for name in self.documents.names() if name.startswith("lease-")]

    def _prune(self, last: int) -> None:
        for name in self.documents.names():
            kind, _, number = name.partition("-")
            if number.isdecimal() and int(number) <= last:
                self.documents.delete(_name(kind, int(number)))


def is_gone(epoch: Epoch) -> bool:
    """Whether the process that runs an epoch is known to have ended."""
    return epoch.holder is not None and epoch.holder.is_gone()


def death_of(epoch: Epoch) -> str:
    """A sentence about a driver that left none."""
    holder = epoch.holder
    who = f"process {holder.pid} on {holder.host}" if holder else "its process"
    if epoch.beat is None or epoch.is_launch:
        how = "has ended" if is_gone(epoch) else f"showed nothing for {LAUNCH_SECONDS:.0f} s"
        return f"the driver did not start: {who} {how}; the last line of its log: {last_words(epoch)}"
    done = ", ".join(f"{q.topic} batch {q.batch}" for q in epoch.beat.queries if q.batch is not None)
    return (
        f"the driver died without a word (killed, or out of memory): {who}, last heartbeat "
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(epoch.beat.time))} UTC, after {done or 'no batch'}"
    )


def last_words(epoch: Epoch) -> str:
    """What its log says last that a reader can use: the sentence of a refusal, else the last line."""
    if epoch.beat is None or epoch.beat.log is None:
        return "no log is known"
    try:
        with Path(epoch.beat.log).open("rb") as log_file:
            log_file.seek(max(0, os.fstat(log_file.fileno()).st_size - _TAIL_BYTES))
            lines = log_file.read().decode(errors="replace").split("\n")
    except OSError as error:
        return f"{epoch.beat.log} cannot be read here ({error.strerror})"
    told = [line.strip() for line in lines if line.strip()]
    sentences = [line for line in told if line.startswith("tideline: ")]
    return next(iter(sentences[-1:] or told[-1:]), "it is empty")[:_WORDS]


class Lease:
    """The right to write a job's checkpoint and table, for as long as no newer epoch exists. Held by a driver."""

    def __init__(self, control: Control, epoch: int, beat: Beat, die: Callable[[], None] | None = None) -> None:
        """Use `acquire`."""
        self.control = control
        self.epoch = epoch
        self.stop: Stop | None = None
        self._beat = beat
        self._die = die or end_this_process
        self._lost_at: float | None = None
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat_until_ended, name="heartbeat", daemon=True)

    @classmethod
    def acquire(cls, control: Control, env: Mapping[str, str] = os.environ, **beat: Any) -> "Lease":
        """Take the next epoch, or the one that was taken for this process by the one who started it."""
        owner = Owner.this_process()
        if env.get(EPOCH_VARIABLE):
            epoch = int(env[EPOCH_VARIABLE])
            if control.is_over(epoch) or not control.claim(epoch, owner):
                raise Refusal(f"epoch {epoch} of stream {control.job!r} is over or taken: this start was given up")
        else:
            epoch = control.reserve(owner)
        first = Beat(time=time.time(), owner=owner, phase=Phase.STARTING, log=env.get(LOG_VARIABLE) or None, **beat)
        lease = cls(control, epoch, first)
        control.beat(epoch, first)
        lease._beating.start()
        return lease

    def check(self) -> None:
        """Raise if another driver has taken over, or this one was declared dead."""
        if self.control.is_over(self.epoch):
            raise LeaseLostError(f"epoch {self.epoch} of {self.control.job!r} was overtaken: this driver ends")

    def show(self, **changes: Any) -> None:
        """What the next heartbeats say."""
        self._beat = replace(self._beat, **changes)

    def release(self, receipt: Receipt) -> None:
        """Stop beating, and say how it ended; the next driver need not wait."""
        self._ended.set()
        self._beating.join()
        self.control.end(self.epoch, receipt)

    def _beat_until_ended(self) -> None:
        """Whatever Spark does: nothing here waits for it."""
        while not self._ended.wait(BEAT_SECONDS):
            try:
                if self._lost_at is None and self.control.is_over(self.epoch):
                    self._lost_at = time.monotonic()
                if self._lost_at is None:
                    self.stop = self.control.stop_of(self.epoch)
                    self.control.beat(self.epoch, replace(self._beat, time=time.time()))
            except Exception:
                # A full disk may pass: one that beats no more would be taken for dead.
                log.warning("no heartbeat of %s could be written", self.control.job, exc_info=True)
            self._end_if_due()

    def _end_if_due(self) -> None:
        if self._lost_at is not None and time.monotonic() - self._lost_at > GRACE_SECONDS:
            log.error("this driver was overtaken and does not come to its end: it ends now")
            self._die()
        stop = self.stop
        if stop and time.time() > stop.ends_hard_at:
            waited = time.time() - stop.stops_at
            cause = f"the micro-batch under way did not end within {waited:.0f} s of the stop request by {stop.by}"
            log.error("%s: this driver ends now", cause)
            with suppress(Exception):
                cause = f"{cause}; it will be run again"
                self.control.end(self.epoch, Receipt(time=time.time(), clean=False, cause=cause))
            self._die()


def end_this_process() -> None:
    """At once, with the JVM: whatever holds the main thread."""
    me = psutil.Process()
    for process in [*me.children(recursive=True), *me.parents()[:1]]:
        with suppress(psutil.Error):
            if "java" in process.name():
                process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def _name(kind: str, number: int) -> str:
    return f"{kind}-{number:010d}"


def _beat(document: dict[str, Any]) -> Beat:
    queries = tuple(QueryProgress(**query) for query in document["queries"])
    changes = {"owner": Owner(**document["owner"]), "phase": Phase(document["phase"]), "queries": queries}
    return Beat(**{**document, **changes})


def _receipt(document: dict[str, Any]) -> Receipt:
    offsets = document.get("offsets") or {}
    whole = {topic: {int(p): end for p, end in ends.items()} for topic, ends in offsets.items()}
    return Receipt(**{**document, "offsets": whole or None})
