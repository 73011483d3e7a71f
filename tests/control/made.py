"""Leases, heartbeats and receipts for tests."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from jobs.control.epochs import Beat, Health, Owner, Phase, Receipt
from jobs.control.folder import Control
from jobs.control.lease import Lease

JOB = "rolling_sum"


@contextmanager
def held(control: Control, **options: Any) -> Iterator[Lease]:
    """Hold a lease while the block runs; it ends in order."""
    lease = Lease.acquire(control, {}, **options)
    try:
        yield lease
    finally:
        lease.release(ended())


def ended(cause: str = "drained", *, clean: bool = True) -> Receipt:
    return Receipt(time=time.time(), clean=clean, cause=cause)


def elsewhere() -> Owner:
    return Owner(host="another-host", pid=1, started_seconds=0.0)


def write_lease(
    control: Control, epoch: int, owner: Owner | None = None, *, age: float = 0.0, launched: bool = False
) -> None:
    """Write a lease that was taken so many seconds ago, by a driver on another machine if no owner is given."""
    taken = {"owner": asdict(owner or elsewhere()), "time": time.time() - age, "launched": launched}
    control.documents.replace(f"lease-{epoch:010d}", taken)


def write_beat(control: Control, epoch: int, *, age: float = 0.0, owner: Owner | None = None, **known: Any) -> None:
    """Write a heartbeat of so many seconds ago."""
    known = {"phase": Phase.RUNNING, **known}
    control.beat(epoch, Beat(time=time.time() - age, owner=owner or elsewhere(), **known))


def run_elsewhere(control: Control, **known: Any) -> int:
    """Add a driver on another machine that wrote a heartbeat a moment ago; it sees no requests."""
    epoch = control.reserve(elsewhere())
    control.beat(epoch, Beat(**{"time": time.time(), "owner": elsewhere(), "phase": Phase.RUNNING, **known}))
    return epoch


def newest_health(control: Control) -> Health:
    return control.health(control.epoch(control.newest()))
