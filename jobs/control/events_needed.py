"""Which events a pipeline still needs. Its recompute and its account each write a time into their control folder.

`ingest` reads these times before it removes old events. A job that never ran needs no events. A job that ran but has
written no time may need all events.
"""

from collections.abc import Iterable

from jobs.control.folder import Control
from jobs.pipelines import PIPELINES
from jobs.pipelines.layout import HOUR_MS
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.source import Source
from jobs.storage.folders import Folder

# The document: {"from_ms": event time}. Events before that time are not needed any more.
EVENTS_NEEDED = "events_needed"
_FOR_EVER_MS = 2**62


def write_needed_from(lake_root: Folder, job: str, from_ms: int) -> None:
    """Write the hour from which a job needs events, if it has changed. Events are removed by whole hours."""
    control, from_ms = Control.of(lake_root, job), max(0, from_ms - from_ms % HOUR_MS)
    if _read(control) != from_ms:
        control.documents.replace(EVENTS_NEEDED, {"from_ms": from_ms})


def read_needed_from(lake_root: Folder, job: str) -> int | None:
    """The time that a job wrote last; None if it wrote none, or if the document cannot be read."""
    return _read(Control.of(lake_root, job))


def needed_from(
    lake_root: Folder, source: Source, pipelines: Iterable[Pipeline] = tuple(PIPELINES.values())
) -> dict[str, int]:
    """For each job over a source, the time from which it needs events."""
    found = {}
    for pipeline in pipelines:
        for job in (pipeline.recompute_job, pipeline.account_job) if pipeline.source.name == source.name else ():
            control = Control.of(lake_root, job)
            from_ms = _read(control)
            if from_ms is not None or control.newest():
                found[job] = from_ms or 0
    return found


def first_needed_ms(needed: dict[str, int]) -> int:
    """The earliest of these times; a time in the far future if there are none."""
    return min(needed.values(), default=_FOR_EVER_MS)


def _read(control: Control) -> int | None:
    from_ms = (control.documents.read(EVENTS_NEEDED) or {}).get("from_ms")
    return from_ms if isinstance(from_ms, int) else None
