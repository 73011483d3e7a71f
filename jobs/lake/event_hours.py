"""Old rows of `events`: they are removed by whole files of whole hours, from the oldest hour on.

An event lies in the hour in which it happened, a rejected record in the hour in which it arrived.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from jobs.lake.delta.reading import value_of
from jobs.pipelines.layout import HOUR_MS

# The first turn may find years. A commit with more files would hold up the stream.
MOST_FILES = 20_000
_HOUR_FORMAT = "%Y-%m-%dT%H"


@dataclass(frozen=True, kw_only=True)
class KeptEvents:
    """How long events are kept, and the time since when somebody still needs them, however old they are."""

    kept: timedelta
    needed_from_ms: Callable[[], int]


@dataclass(frozen=True, kw_only=True)
class OldHours:
    """Files to be removed with their sizes. All events that remain happened at or after ``before_ms``."""

    files: dict[str, int]
    before_ms: int


def old_hours(table: DeltaTable, kept: timedelta, needed_from_ms: int, now_ms: int) -> OldHours:
    """The files of hours that are older than is kept, and that nobody needs.

    The age is that of the newest record, by its broker's stamp, or by ``now_ms`` if that is earlier: one clock that is
    wrong removes nothing.
    """
    actions = pa.table(table.get_add_actions(flatten=True))
    now_ms = min(now_ms, _newest_arrival_ms(actions))
    before_ms = min(now_ms - kept // timedelta(milliseconds=1), needed_from_ms)
    sizes = zip(actions.column("path").to_pylist(), actions.column("size_bytes").to_pylist(), strict=True)
    by_age = sorted((hour_ms(path), path, size) for path, size in sizes)
    old = [(start, path, size) for start, path, size in by_age if start + HOUR_MS <= before_ms][:MOST_FILES]
    return OldHours(files={path: size for _, path, size in old}, before_ms=old[-1][0] + HOUR_MS if old else 0)


def hour_ms(file: str) -> int:
    """When the hour begins in whose folder a file lies."""
    begin = datetime.strptime(value_of(file), _HOUR_FORMAT).replace(tzinfo=UTC)
    return round(begin.timestamp()) * 1000


def _newest_arrival_ms(actions: pa.Table) -> int:
    """When the newest record arrived, as far as the log knows; 0 if it does not."""
    if "max.arrival_time" not in actions.column_names:
        return 0
    newest: datetime | None = pc.max(actions.column("max.arrival_time")).as_py()
    if newest is None:
        return 0
    return round((newest if newest.tzinfo else newest.replace(tzinfo=UTC)).timestamp() * 1000)
