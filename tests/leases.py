"""The product's own lease and control folder, used by several actors in one process.

Each actor counts as a process on another machine, so others judge it by its heartbeats alone. The world stands in for
the machines only: it is their clock, and it sends the heartbeats of all actors that are not suspended.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from greenlet import getcurrent, greenlet

from jobs.control import folder as control
from jobs.control import lease as lease_module
from jobs.control import writing as writing_module
from jobs.control.epochs import DEAD_SECONDS, Owner, Receipt
from jobs.control.folder import Control
from jobs.control.lease import Lease
from jobs.finality import planning

_ELSEWHERE = Owner(host="elsewhere", pid=1, started_seconds=0.0)


class Pulse:
    """A stand-in for the event that the heartbeat waits on: it allows the turns that the world gives, then it ends."""

    def __init__(self) -> None:
        self.turns = 0
        self.ended = False

    def set(self) -> None:
        self.ended = True

    def wait(self, _seconds: float) -> bool:
        self.turns -= 1
        return self.ended or self.turns < 0


@dataclass
class Leases:
    """Which actor holds which lease, which leases are suspended, and the time on all machines."""

    operate: Callable[[str], None]
    seconds: float = 1_800_000_000.0
    held: dict[Lease, greenlet] = field(default_factory=dict)
    asleep: set[Lease] = field(default_factory=set)
    kind: type[Lease] = Lease
    # Set while an actor is killed: it must write nothing on its way out.
    killing: bool = False

    def go_on(self, seconds: float) -> None:
        """Let time pass: each lease that is not suspended sends a heartbeat."""
        self.seconds += seconds
        for lease in self.held:
            if lease not in self.asleep:
                lease._ended.turns = 1
                lease._beat_until_ended()

    def wait(self, seconds: float) -> None:
        """The actors' `time.sleep`."""
        self.go_on(seconds)
        self.operate("lease: waiting")

    @property
    def newest(self) -> Lease | None:
        """The lease of the newest epoch among living actors."""
        return max(self.held, key=lambda lease: lease.epoch, default=None)

    def fall_asleep(self) -> greenlet | None:
        """Suspend the holder for so long that it counts as dead. Return that actor, or None if no lease is held."""
        if (lease := self.newest) is None or lease in self.asleep:
            return None
        self.asleep.add(lease)
        self.go_on(DEAD_SECONDS)
        return self.held[lease]

    def wake(self, actor: greenlet) -> None:
        """Let the actor's heartbeats go on."""
        self.asleep -= {lease for lease, holder in self.held.items() if holder is actor}

    def bury(self, actor: greenlet) -> None:
        """Forget a killed actor: its heartbeats stop, and other actors must notice this themselves."""
        self.held = {lease: holder for lease, holder in self.held.items() if holder is not actor}

    def overtake(self, root: Any, job: str) -> None:
        """Suspend the holder; another actor then takes the lease and releases it at once."""
        self.fall_asleep()
        writing_module.Lease.acquire(Control.of(root, job), env={}).release(
            Receipt(time=self.seconds, clean=True, cause="")
        )

    @property
    def clock(self) -> Any:
        """The module `time` on all machines."""
        return SimpleNamespace(time=lambda: self.seconds, monotonic=lambda: self.seconds, sleep=self.wait)

    def install_in(self, patch: pytest.MonkeyPatch, module: Any) -> None:
        """Make a module of the product take these leases, after `install`."""
        patch.setattr(module, "Lease", self.kind)
        patch.setattr(module, "time", self.clock)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Give the product this clock and these heartbeats."""
        leases = self

        class Held(Lease):
            """The product's lease, which the world lists for as long as it is held."""

            @classmethod
            def acquire(cls, *arguments: Any, **more: Any) -> Lease:
                leases.operate("lease: take")
                taken = super().acquire(*arguments, **more)
                leases.held[taken] = getcurrent()
                leases.operate("lease: taken")
                return taken

            def release(self, receipt: Receipt) -> None:
                if not leases.killing:
                    super().release(receipt)
                leases.held.pop(self, None)
                leases.asleep.discard(self)

        self.kind = Held
        thread = SimpleNamespace(start=lambda: None, join=lambda: None)
        self.install_in(patch, writing_module)
        for module in (control, lease_module, planning):
            patch.setattr(module, "time", self.clock)
        patch.setattr(lease_module, "threading", SimpleNamespace(Event=Pulse, Thread=lambda **_: thread))
        patch.setattr(lease_module, "end_this_process", lambda: None)
        patch.setattr(Owner, "this_process", classmethod(lambda _: _ELSEWHERE))
        # Each look at the folder is an operation, and a few are enough.
        patch.setattr(writing_module, "_POLL_SECONDS", 4.0)
        patch.setattr(control, "_LOOK_SECONDS", 1.3)
        # Power cuts are tested elsewhere.
        patch.setattr(os, "fsync", lambda _: None)
