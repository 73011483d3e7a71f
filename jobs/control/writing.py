"""The lease of a batch job for the time of one write. Other writers wait meanwhile."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from jobs.control.epochs import Phase, Receipt
from jobs.control.folder import Control
from jobs.control.lease import Lease
from jobs.refusal import Refusal
from jobs.storage.folders import Folder

# A publish keeps the lease while it sends a large slice to the topic, so other writers may have to wait long.
LEASE_PATIENCE_SECONDS = 300.0
_POLL_SECONDS = 0.2


@contextmanager
def writing(lake_root: Folder, job: str) -> Iterator[Lease]:
    """Hold the lease of a batch job for a short write. Other writers wait their turn."""
    lease = _acquire(lake_root, job)
    # Otherwise a long write would look like a start that takes too long: sending a weekend's slices takes a while.
    lease.update_heartbeat(phase=Phase.RUNNING)
    receipt = Receipt(time=time.time(), clean=False, cause="the write failed")
    try:
        yield lease
        receipt = Receipt(time=time.time(), clean=True, cause="written")
    finally:
        lease.release(receipt)


def _acquire(lake_root: Folder, job: str) -> Lease:
    control = Control.of(lake_root, job)
    # Checked before the wait for the lease: if the store cannot create exclusively, waiting does not help.
    control.documents.require_exclusive_create()
    deadline = time.monotonic() + LEASE_PATIENCE_SECONDS
    while True:
        try:
            return Lease.acquire(control, env={})
        except Refusal:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)
