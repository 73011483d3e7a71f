"""The lease of a streaming job or of a pipeline. One process at a time holds it, and ends when it has lost it."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil

from jobs.control.epochs import (
    BEAT_SECONDS,
    START_SECONDS,
    STOP_SECONDS,
    Beat,
    Owner,
    Phase,
    Receipt,
    Stop,
)
from jobs.control.folder import Control
from jobs.refusal import Refusal

log = logging.getLogger(__name__)

# Set for a driver if its launcher took the lease for it.
EPOCH_VARIABLE = "TIDELINE_EPOCH"
LOG_VARIABLE = "TIDELINE_DRIVER_LOG"
# An overtaken driver, or one that hangs while it stops, is killed after this time if it does not end by itself.
GRACE_SECONDS = 30.0


class LeaseLostError(Refusal):
    """A newer epoch exists, or this one was declared dead: this driver must commit nothing more."""


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
        # When the present phase began, by the monotonic clock. The time of day is not used, because it may be
        # corrected.
        self._since = time.monotonic()
        self._stop_seen: tuple[Stop, float] | None = None
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat_until_ended, name="heartbeat", daemon=True)

    @classmethod
    def acquire(cls, control: Control, env: Mapping[str, str] = os.environ, **beat: Any) -> "Lease":
        """Take the next epoch, or the epoch that the launcher took for this process."""
        owner = Owner.this_process()
        if env.get(EPOCH_VARIABLE):
            epoch = int(env[EPOCH_VARIABLE])
            if control.is_over(epoch) or not control.claim(epoch, owner):
                raise Refusal(f"epoch {epoch} of job {control.job!r} has ended, or has another driver: this start ends")
        else:
            epoch = control.reserve(owner)
        first = Beat(time=time.time(), owner=owner, phase=Phase.STARTING, log=env.get(LOG_VARIABLE) or None, **beat)
        lease = cls(control, epoch, first)
        control.beat(epoch, first)
        lease._beating.start()
        return lease

    @property
    def is_lost(self) -> bool:
        """Whether the heartbeat thread saw a newer epoch, or a receipt that declares this driver dead."""
        return self._lost_at is not None

    def check(self) -> None:
        """Raise if another driver has taken over, or if this one was declared dead. Call it before each commit."""
        if self.is_lost or self.control.is_over(self.epoch):
            raise LeaseLostError(
                f"epoch {self.epoch} of {self.control.job!r} has lost its lease, because a newer epoch exists or this "
                "one was declared dead: this driver ends and commits nothing more"
            )

    def update_heartbeat(self, **changes: Any) -> None:
        """Change the contents of the next heartbeats."""
        if changes.get("phase", self._beat.phase) is not self._beat.phase:
            self._since = time.monotonic()
        self._beat = replace(self._beat, **changes)

    def release(self, receipt: Receipt) -> None:
        """Stop the heartbeat and write the receipt, so that the next driver need not wait."""
        self._ended.set()
        self._beating.join()
        self.control.end(self.epoch, receipt)

    def _beat_until_ended(self) -> None:
        """Write heartbeats until the lease is released. Nothing here waits for Spark."""
        while not self._ended.wait(BEAT_SECONDS):
            try:
                if self._lost_at is None and self.control.is_over(self.epoch):
                    self._lost_at = time.monotonic()
                if self._lost_at is None:
                    self.stop = self.control.stop_of(self.epoch)
                    self.control.beat(self.epoch, replace(self._beat, time=time.time()))
            except Exception:
                # A full disk may pass, and a driver without heartbeats would count as dead.
                log.warning("no heartbeat of %s could be written", self.control.job, exc_info=True)
            self._end_if_due()

    def _end_if_due(self) -> None:
        """Kill a driver that does not end by itself, whatever blocks it."""
        if self._lost_at is not None and time.monotonic() - self._lost_at > GRACE_SECONDS:
            log.error("this driver has lost its lease and did not end within %.0f s: it is killed now", GRACE_SECONDS)
            self._die()
        if cause := self._overdue():
            log.error("%s: this driver is killed now", cause)
            with suppress(Exception):
                self.control.end(self.epoch, Receipt(time=time.time(), clean=False, cause=cause))
            self._die()

    def _overdue(self) -> str | None:
        now = time.monotonic()
        if self.stop and (self._stop_seen is None or self._stop_seen[0] != self.stop):
            self._stop_seen = self.stop, now
        if self._stop_seen and now - self._stop_seen[1] > self._stop_seen[0].patience_seconds:
            stop, seen = self._stop_seen
            waited = f"within {now - seen:.0f} s of the stop request by {stop.by}"
            return f"the micro-batch under way did not end {waited}; it will be run again"
        if self._beat.phase is Phase.STOPPING and now - self._since > STOP_SECONDS + GRACE_SECONDS:
            return f"the driver hung for {now - self._since:.0f} s while it stopped"
        if self._beat.phase is Phase.STARTING and now - self._since > START_SECONDS:
            return f"no query had begun {now - self._since:.0f} s after the start"
        return None


def end_this_process() -> None:
    """Kill this process and its JVM at once, whatever blocks the main thread."""
    me = psutil.Process()
    # Under spark-submit the JVM is the parent; otherwise the parent is not part of this driver.
    parents = me.parents()[:1] if "PYSPARK_GATEWAY_PORT" in os.environ else []
    for process in [*me.children(recursive=True), *parents]:
        with suppress(psutil.Error):
            if "java" in process.name():
                process.kill()
    os.kill(os.getpid(), signal.SIGKILL)
