"""Where the slices of a pipeline begin, and how far all of them are final."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from jobs.lake.events import Landed
from jobs.lake.final import FinalTable
from jobs.lake.slices import Header
from jobs.pipelines.days import tide_line
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import first_whole, slice_named


@dataclass(frozen=True, kw_only=True)
class Finals:
    """The final table, if anything was ever published, and how many slices of each day are final."""

    table: FinalTable | None
    by_day: Mapping[str, int]

    @classmethod
    def of(cls, table: FinalTable | None) -> Self:
        """Count the final slices of a table by day; ``table`` is None if nothing was ever published."""
        return cls(table=table, by_day=table.slices_by_day() if table else {})

    def headers(self, days: Collection[str]) -> dict[str, Header]:
        """The headers of the final slices that begin on these days."""
        return self.table.headers(self.by_day.keys() & days) if self.table else {}

    def changed_since(self, time_ms: int) -> set[str]:
        """The days with slices that were published since a moment."""
        return self.table.days_changed_since(time_ms) if self.table else set()

    def first(self) -> str | None:
        """The name of the first final slice."""
        return min(self.headers([min(self.by_day)])) if self.by_day else None

    def newest(self) -> str | None:
        """The name of the last final slice."""
        return max(self.headers([max(self.by_day)])) if self.by_day else None


def begin_and_tide_line(
    pipeline: Pipeline, final: FinalTable | None, landed: Landed | None
) -> tuple[int | None, int | None]:
    """Return where the slices of a pipeline begin, and its tide line. Each is None if there is none."""
    finals = Finals.of(final)
    first_ms = first_event_ms(pipeline, landed, finals)
    return first_ms, line_ms_of(pipeline, first_ms, finals, landed)


def whole_from_ms(pipeline: Pipeline, landed: Landed | None) -> int:
    """The begin of the first slice that has lost no event; 0 if no event was ever removed."""
    from_ms = landed.events_from_ms if landed else 0
    return first_whole(pipeline, from_ms, from_ms).start_ms if from_ms else 0


def first_event_ms(pipeline: Pipeline, landed: Landed | None, finals: Finals) -> int | None:
    """Where the slices of a pipeline begin; None if it has no events and no final slices.

    That is the time of the first landed event, with two exceptions. If old events were removed, it is the begin of the
    first slice that still has all its events. If a final slice begins even earlier, it is the begin of the first final
    slice.
    """
    event_ms, first = landed.first_ms() if landed else None, finals.first()
    if landed and event_ms is not None:
        event_ms = max(event_ms, first_whole(pipeline, event_ms, landed.events_from_ms).start_ms)
    starts = [event_ms] if event_ms is not None else []
    return min([*starts, slice_named(pipeline, first).start_ms] if first else starts, default=None)


def line_ms_of(pipeline: Pipeline, first_ms: int | None, finals: Finals, landed: Landed | None) -> int | None:
    """The tide line. It passes over slices that cannot become final any more, because their events were removed."""
    tide_line_ms, whole_ms = _line_from(pipeline, first_ms, finals), whole_from_ms(pipeline, landed)
    if first_ms is None or whole_ms <= (first_ms if tide_line_ms is None else tide_line_ms):
        return tide_line_ms
    later_ms = _line_from(pipeline, whole_ms, finals)
    return whole_ms if later_ms is None else later_ms


def _line_from(pipeline: Pipeline, first_ms: int | None, finals: Finals) -> int | None:
    return tide_line(pipeline, first_ms, finals.by_day, lambda day: finals.headers([day]))
