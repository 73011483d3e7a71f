"""Which events a pipeline still needs. Its recompute and its account say so, each in its control folder.

`ingest` removes old events, and asks here first. A job that never ran needs nothing. One that ran and has not said
what it needs may need everything.
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


def say_needed(lake_root: Folder, job: str, from_ms: int) -> None:
    """Say from which time on a job needs events. Events are removed by whole hours, so only a new hour is written."""
    control, from_ms = Control.of(lake_root, job), max(0, from_ms - from_ms % HOUR_MS)
    if _said(control) != from_ms:
        control.documents.replace(EVENTS_NEEDED, {"from_ms": from_ms})


def said_needed(lake_root: Folder, job: str) -> int | None:
    """What a job has said last; none if it has not, or if it cannot be read."""
    return _said(Control.of(lake_root, job))


def needed_from(
    lake_root: Folder, source: Source, pipelines: Iterable[Pipeline] = tuple(PIPELINES.values())
) -> dict[str, int]:
    """From which time on each job over a source needs its events."""
    found = {}
    for pipeline in pipelines:
        for job in (pipeline.recompute_job, pipeline.account_job) if pipeline.source.name == source.name else ():
            control = Control.of(lake_root, job)
            said = _said(control)
            if said is not None or control.newest():
                found[job] = said or 0
    return found


def first_needed_ms(needed: dict[str, int]) -> int:
    """The earliest of these times."""
    return min(needed.values(), default=_FOR_EVER_MS)


def _said(control: Control) -> int | None:
    said = (control.documents.read(EVENTS_NEEDED) or {}).get("from_ms")
    return said if isinstance(said, int) else None
