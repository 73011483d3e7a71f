"""The product's own lease and control folder among the actors of one process.

Each actor counts as a process of another machine, so others judge it by its heartbeats alone. The world stands in for
the machine only: it is the clock, and it lets the heartbeats of those beat that are awake.
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
from jobs.control.epochs import DEAD_SECONDS, Owner, Receipt
from jobs.control.folder import Control
from jobs.control.lease import Lease
from jobs.finality import planning

_ELSEWHERE = Owner(host="elsewhere", pid=1, started_seconds=0.0)


class Pulse:
    """What the heartbeat waits for: as many turns as the world gives it, then its end."""

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
    """Who holds a lease, whether it sleeps, and what time it is on all machines."""

    operate: Callable[[str], None]
    seconds: float = 1_800_000_000.0
    held: dict[Lease, greenlet] = field(default_factory=dict)
    asleep: set[Lease] = field(default_factory=set)
    kind: type[Lease] = Lease
    # While an actor is killed: it writes nothing on its way out.
    killing: bool = False

    def go_on(self, seconds: float) -> None:
        """Time passes; whoever is awake shows it."""
        self.seconds += seconds
        for lease in self.held:
            if lease not in self.asleep:
                lease._ended.turns = 1
                lease._beat_until_ended()

    def wait(self, seconds: float) -> None:
        """What `time.sleep` is to an actor."""
        self.go_on(seconds)
        self.operate("lease: waiting")

    @property
    def newest(self) -> Lease | None:
        """That of the newest epoch among actors that live."""
        return max(self.held, key=lambda lease: lease.epoch, default=None)

    def fall_asleep(self) -> greenlet | None:
        """Suspend the holder for so long that it counts as dead; which actor that is, none if nobody holds one."""
        if (lease := self.newest) is None or lease in self.asleep:
            return None
        self.asleep.add(lease)
        self.go_on(DEAD_SECONDS)
        return self.held[lease]

    def wake(self, actor: greenlet) -> None:
        """Let its heartbeats beat again."""
        self.asleep -= {lease for lease, holder in self.held.items() if holder is actor}

    def bury(self, actor: greenlet) -> None:
        """It is killed: it shows no more, and others find that out by themselves."""
        self.held = {lease: holder for lease, holder in self.held.items() if holder is not actor}

    def overtake(self, root: Any, job: str) -> None:
        """The holder sleeps, and somebody else holds the lease for a moment."""
        self.fall_asleep()
        planning.Lease.acquire(Control.of(root, job), env={}).release(Receipt(time=self.seconds, clean=True, cause=""))

    @property
    def clock(self) -> Any:
        """What `time` is on all machines."""
        return SimpleNamespace(time=lambda: self.seconds, monotonic=lambda: self.seconds, sleep=self.wait)

    def install_in(self, patch: pytest.MonkeyPatch, module: Any) -> None:
        """Have a module of the product take such leases, after `install`."""
        patch.setattr(module, "Lease", self.kind)
        patch.setattr(module, "time", self.clock)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Give the product this clock and these heartbeats."""
        leases = self

        class Held(Lease):
            """The product's, known to the world for as long as it is held."""

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
        self.install_in(patch, planning)
        for module in (control, lease_module):
            patch.setattr(module, "time", self.clock)
        patch.setattr(lease_module, "threading", SimpleNamespace(Event=Pulse, Thread=lambda **_: thread))
        patch.setattr(lease_module, "end_this_process", lambda: None)
        patch.setattr(Owner, "this_process", classmethod(lambda _: _ELSEWHERE))
        # Each look is an operation: a few are enough.
        patch.setattr(planning, "_POLL_SECONDS", 4.0)
        patch.setattr(control, "_LOOK_SECONDS", 1.3)
        # Another test judges power cuts.
        patch.setattr(os, "fsync", lambda _: None)
