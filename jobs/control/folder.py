"""The control folder of a job. Its leases, heartbeats, stop requests and receipts are read and written here.

Each streaming job has one. The recompute and the account of a pipeline have one, too, since they write tables.

Each epoch has a lease, a heartbeat, a receipt, and a stop request if there was one. A lease is created once and never
changed, and only the newest epoch may write. So two drivers that start together cannot both win. An overtaken driver
notices it when it looks for the lease of the next epoch.
"""

import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from jobs.control.epochs import (
    DEAD_SECONDS,
    LAUNCH_SECONDS,
    LOOK_ON_SECONDS,
    Attach,
    Beat,
    Epoch,
    Health,
    Launch,
    Owner,
    Receipt,
    Stop,
    Wait,
    health,
    next_step,
)
from jobs.control.incidents import report_of
from jobs.pipelines.layout import control_of
from jobs.refusal import Refusal
from jobs.storage.documents import Documents
from jobs.storage.folders import Folder
from jobs.times import utc

log = logging.getLogger(__name__)

KEPT_EPOCHS = 10
_LOOK_SECONDS = 0.2
_TAIL_BYTES = 20_000
_LINE_CHARACTERS = 500

_Document = TypeVar("_Document")


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """The document of a lease: when it was taken, by whom, and whether for a driver that starts later."""

    time: float
    owner: Owner | None = None
    launched: bool = False


@dataclass(frozen=True)
class Control:
    """The control folder of one job."""

    documents: Documents
    job: str

    @classmethod
    def of(cls, lake_root: Folder, job: str) -> "Control":
        """The folder of a job below the lake's root."""
        return cls(Documents.at(lake_root / control_of(job), report_of(lake_root)), job)

    def newest(self) -> int:
        """The number of the newest epoch, which holds the lease; 0 if there was no epoch yet."""
        return max(self._numbers(), default=0)

    def newest_epoch(self) -> Epoch | None:
        """The documents of the newest epoch, which holds the lease."""
        newest = self.newest()
        return self.epoch(newest) if newest else None

    def history(self) -> list[Epoch]:
        """The epochs that are kept, the newest last."""
        return [self.epoch(number) for number in sorted(self._numbers())]

    def epoch(self, number: int) -> Epoch:
        """The documents of one epoch."""
        # A power cut may have emptied the lease; then the process that took it has ended, too.
        lease = self._read("lease", number, _Taken) or _Taken(time=0.0)
        return Epoch(
            number=number,
            taken=lease.time,
            owner=lease.owner,
            launched=lease.launched,
            beat=self._read("heartbeat", number, Beat),
            stop=self._read("stop", number, Stop),
            receipt=self._read("receipt", number, Receipt),
        )

    def health(self, epoch: Epoch) -> Health:
        """Its state now, as seen from this machine. An epoch is watched for a while before it counts as dead."""
        gone = is_gone(epoch)
        state = health(epoch, time.time(), gone=gone)
        if state is not Health.DEAD or gone or epoch.beat is None:
            return state
        deadline = time.monotonic() + LOOK_ON_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            seen = self.epoch(epoch.number)
            if seen.receipt or seen.last_sign != epoch.last_sign:
                return health(seen, seen.last_sign)
        return state

    def write_missing_receipt(self) -> None:
        """Write the receipt of a driver that ended without one."""
        epoch = self.newest_epoch()
        if epoch and self.health(epoch) is Health.DEAD:
            self._end_as_dead(epoch)

    def _end_as_dead(self, epoch: Epoch) -> None:
        self.end(epoch.number, Receipt(time=time.time(), clean=False, cause=death_of(epoch)))

    def next_step(self) -> Attach | Wait | Launch:
        """Choose a supervisor's next step now."""
        self.write_missing_receipt()
        history = self.history()
        if history and self.health(history[-1]).alive:
            return Attach(history[-1].number)
        return next_step(history, time.time(), job=self.job)

    def reset_failures(self, by: str) -> None:
        """Forget the failures so far, so that an operator can start the job at once. Refused while a driver runs."""
        number = self.reserve(Owner.this_process())
        self.end(
            number,
            Receipt(time=time.time(), clean=True, cause=f"earlier failures do not count any more: started by {by}"),
        )

    def reserve(self, owner: Owner, *, launched: bool = False) -> int:
        """Take the next epoch, unless the last holder runs; ``launched``: it is for a driver that starts later."""
        self.documents.require_exclusive_create()
        last = self.newest()
        if last:
            self._refuse_if_alive(last)
        taken = _Taken(time=time.time(), owner=owner, launched=launched)
        created = self.documents.create(_name("lease", last + 1), asdict(taken))
        # If this process was suspended after it read `last`, newer epochs may have come. Then the lease of this number
        # may be pruned already, and its name is free again.
        if not created or self.newest() > last + 1:
            raise Refusal(
                f"another driver of {self.job!r} started at the same moment and holds the lease: this start ends"
            )
        self._prune(last + 1 - KEPT_EPOCHS)
        return last + 1

    def _refuse_if_alive(self, number: int) -> None:
        epoch = self.epoch(number)
        state = self.health(epoch)
        if state.alive:
            holder = epoch.holder
            who = f"process {holder.pid} on {holder.host}" if holder else "a driver that is being started"
            raise Refusal(
                f"job {self.job!r} is already running: {who} holds epoch {number}, its last heartbeat is "
                f"{max(0.0, time.time() - epoch.last_sign):.0f} s old; stop it first, or, if it was killed, wait until "
                f"its last heartbeat is {DEAD_SECONDS:.0f} s old"
            )
        if state is Health.DEAD:
            self._end_as_dead(epoch)

    def claim(self, number: int, owner: Owner) -> bool:
        """Become the driver of an epoch that the launcher took; False if the epoch has a driver already."""
        self.documents.require_exclusive_create()
        return self.documents.create(_name("driver", number), asdict(owner))

    def beat(self, number: int, beat: Beat) -> None:
        """Write the heartbeat of an epoch. It need not be durable, because no driver survives a power cut."""
        self.documents.replace(_name("heartbeat", number), asdict(beat), durable=False)

    def ask_to_stop(self, number: int, stop: Stop) -> None:
        """Ask the driver of an epoch to end; a later request replaces an earlier one."""
        self.documents.replace(_name("stop", number), asdict(stop))

    def end(self, number: int, receipt: Receipt) -> bool:
        """Write how an epoch ended; False if it has a receipt already, which stays."""
        return self.documents.create(_name("receipt", number), asdict(receipt))

    def is_over(self, number: int) -> bool:
        """Whether a newer epoch exists, or this one has its receipt."""
        successor, receipt, own = _name("lease", number + 1), _name("receipt", number), _name("lease", number)
        exists = self.documents.exists
        # After a long suspension a driver finds all documents of its epoch pruned, its own lease too.
        return exists(successor) or exists(receipt) or not exists(own)

    def stop_of(self, number: int) -> Stop | None:
        """The stop request to the driver of an epoch, if there is one."""
        return self._read("stop", number, Stop)

    def _read(self, kind: str, number: int, type_: type[_Document]) -> _Document | None:
        """One document; None if it is missing, or if another version wrote it and this version cannot read it.

        Fields that this version does not have are ignored: a driver of a newer version may write more.
        """
        document = self.documents.read(_name(kind, number))
        try:
            return None if document is None else msgspec.convert(document, type_, str_keys=True)
        except msgspec.ValidationError:
            log.warning("document %s of job %s cannot be read, and counts as missing", _name(kind, number), self.job)
            return None

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
    """A sentence about a driver that left no receipt."""
    holder = epoch.holder
    who = f"process {holder.pid} on {holder.host}" if holder else "its process"
    if epoch.beat is None or epoch.is_launch:
        how = "has ended" if is_gone(epoch) else f"wrote no heartbeat for {LAUNCH_SECONDS:.0f} s"
        return f"the driver did not start: {who} {how}; the last line of its log: {last_words(epoch)}"
    done = ", ".join(f"{q.topic} batch {q.batch}" for q in epoch.queries if q.batch is not None)
    return (
        f"the driver died without a receipt (killed, or out of memory): {who}, last heartbeat "
        f"{utc(epoch.beat.time)} UTC, after {done or 'no batch'}"
    )


def last_words(epoch: Epoch) -> str:
    """The most useful line at the end of its log: the sentence of a refusal, else the last line."""
    if epoch.log is None:
        return "no log is known"
    try:
        lines = tail(Path(epoch.log), _TAIL_BYTES).split("\n")
    except OSError as error:
        return f"{epoch.log} cannot be read here ({error.strerror})"
    told = [line.strip() for line in lines if line.strip()]
    sentences = [line for line in told if line.startswith("tideline: ")]
    return next(iter(sentences[-1:] or told[-1:]), "the log is empty")[:_LINE_CHARACTERS]


def tail(log_file: Path, limit_bytes: int) -> str:
    """The end of a log."""
    with log_file.open("rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - limit_bytes))
        return stream.read().decode(errors="replace")


def _name(kind: str, number: int) -> str:
    return f"{kind}-{number:010d}"
