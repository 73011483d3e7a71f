"""The control folder of a streaming job: who may write, and whether it is alive.

A lease is a file per epoch, created once and never changed: the newest epoch holds. So two drivers that start
together cannot both win, and a driver that was overtaken sees it by one look for the next epoch.
"""

import json
import logging
import os
import socket
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from jobs.refusal import Refusal

log = logging.getLogger(__name__)

BEAT_SECONDS = 2.0
STALE_SECONDS = 10.0
_KEPT_LEASES = 5
# Two readings of one process's start differ by the clock's corrections between two looks at the clock.
_SAME_START_SECONDS = 1.5


class LeaseLostError(Refusal):
    """A newer epoch exists: this driver must commit nothing more."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that holds a lease; its start time tells it from a later process with the same id.

    ``started_seconds`` counts from the boot of the machine: a clock that is set anew does not move it.
    """

    host: str
    pid: int
    started_seconds: float

    @classmethod
    def this_process(cls) -> "Owner":
        """The driver that asks."""
        return cls(host=socket.gethostname(), pid=os.getpid(), started_seconds=_started_seconds(psutil.Process()))

    def is_gone(self) -> bool:
        """True if it is known to be dead: only a process of this machine can be."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            other = abs(_started_seconds(process) - self.started_seconds) > _SAME_START_SECONDS
            return other or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


def _started_seconds(process: psutil.Process) -> float:
    return float(process.create_time() - psutil.boot_time())


class Lease:
    """The right to write a job's checkpoint and table, for as long as no newer epoch exists."""

    def __init__(self, folder: Path, epoch: int) -> None:
        """Use `acquire`."""
        self.folder = folder
        self.epoch = epoch
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat_until_ended, name="heartbeat", daemon=True)

    @classmethod
    def acquire(cls, folder: Path, job: str) -> "Lease":
        """Take the next epoch, unless the holder of the last one is alive."""
        folder.mkdir(parents=True, exist_ok=True)
        epoch = newest_epoch(folder)
        if epoch:
            _refuse_if_held(folder, epoch, job)
        lease = cls(folder, epoch + 1)
        try:
            taken = {"owner": asdict(Owner.this_process()), "time": time.time()}
            write_new(_lease_file(folder, epoch + 1), json.dumps(taken))
            # One that slept since its look at the newest epoch may find its file already pruned.
            overtaken = newest_epoch(folder) > epoch + 1
        except FileExistsError:
            overtaken = True
        if overtaken:
            raise Refusal(f"another driver of {job!r} started at the same moment and holds the lease")
        lease._beat(time.time())
        lease._beating.start()
        for old in range(max(1, epoch - _KEPT_LEASES), epoch - _KEPT_LEASES + 1):
            _lease_file(folder, old).unlink(missing_ok=True)
        return lease

    def check(self) -> None:
        """Raise if another driver has taken over."""
        if newest_epoch(self.folder) > self.epoch:
            raise LeaseLostError(f"epoch {self.epoch} in {self.folder} was overtaken: this driver ends")

    def release(self) -> None:
        """Stop beating; the next driver need not wait."""
        self._ended.set()
        self._beating.join()
        if newest_epoch(self.folder) == self.epoch:
            self._beat(0)

    def _beat_until_ended(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            if newest_epoch(self.folder) > self.epoch:
                return
            try:
                self._beat(time.time())
            except OSError:
                # A full disk may pass: one that beats no more would be taken for dead.
                log.warning("no heartbeat could be written to %s", self.folder, exc_info=True)

    def _beat(self, now: float) -> None:
        replace(self.folder / "heartbeat", json.dumps({"epoch": self.epoch, "time": now}))


def newest_epoch(folder: Path) -> int:
    """The epoch that holds; 0 if nobody ever did."""
    names = (file.name for file in folder.iterdir() if file.name.startswith("lease-")) if folder.is_dir() else ()
    return max((int(name.removeprefix("lease-")) for name in names), default=0)


def _lease_file(folder: Path, epoch: int) -> Path:
    return folder / f"lease-{epoch:010d}"


def _refuse_if_held(folder: Path, epoch: int, job: str) -> None:
    lease = json.loads(_lease_file(folder, epoch).read_text())
    owner = Owner(**lease["owner"])
    age = max(0.0, time.time() - _last_sign(folder, epoch, lease))
    if owner.is_gone() or age > STALE_SECONDS:
        return
    raise Refusal(
        f"stream {job!r} is already running: process {owner.pid} on {owner.host} holds epoch {epoch}, "
        f"its last heartbeat is {age:.0f} s old; stop it first, or wait {STALE_SECONDS:.0f} s after it has died"
    )


def _last_sign(folder: Path, epoch: int, lease: dict[str, Any]) -> float:
    """When the holder last showed itself; a released lease says 0."""
    try:
        beat = json.loads((folder / "heartbeat").read_text())
    except (FileNotFoundError, ValueError):
        return float(lease["time"])
    return float(beat["time"] if beat["epoch"] == epoch else lease["time"])


def write_new(file: Path, text: str) -> None:
    """Create a whole file, or raise FileExistsError: no reader sees a part of it."""
    written = _write_beside(file, text)
    try:
        os.link(written, file)
    finally:
        written.unlink()


def replace(file: Path, text: str) -> None:
    """Put a whole file in the place of another."""
    _write_beside(file, text).replace(file)


def _write_beside(file: Path, text: str) -> Path:
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".")
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
            stream.flush()
            # Else a power cut can leave the name without its content.
            os.fsync(handle)
    except OSError:
        Path(name).unlink()
        raise
    return Path(name)
