"""The choice of old rows of `events` to remove: whole files of whole hours, from the oldest hour on.

An event lies in the hour of its event time, and a rejected record in the hour of its arrival.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from jobs.lake.delta.reading import value_of
from jobs.pipelines.layout import HOUR_FORMAT, HOUR_MS
from jobs.times import ms_of

# The first turn may find years of files. A commit with more files than this would delay the stream.
MOST_FILES = 20_000


@dataclass(frozen=True, kw_only=True)
class KeptEvents:
    """How long events are kept. Events from the time ``needed_from_ms()`` on stay, even if they are older than that."""

    kept: timedelta
    needed_from_ms: Callable[[], int]


def old_hours(table: DeltaTable, kept: timedelta, needed_from_ms: int, now_ms: int) -> tuple[dict[str, int], int]:
    """Find the hours that are older than ``kept`` and that no pipeline needs.

    Return their files, with their sizes, and the time when the newest of these hours ends: 0 if there is none. All
    events from then on remain. If an hour has more files than one commit should remove, the next turn removes its other
    files.

    An hour's age is measured from the arrival of the newest record, which the broker stamps, or from ``now_ms`` if that
    is earlier. So one wrong clock alone removes nothing.
    """
    actions = pa.table(table.get_add_actions(flatten=True))
    now_ms = min(now_ms, _newest_arrival_ms(actions))
    before_ms = min(now_ms - kept // timedelta(milliseconds=1), needed_from_ms)
    sizes = zip(actions.column("path").to_pylist(), actions.column("size_bytes").to_pylist(), strict=True)
    by_age = sorted((hour_ms(path), path, size) for path, size in sizes)
    old = [(start, path, size) for start, path, size in by_age if start + HOUR_MS <= before_ms][:MOST_FILES]
    return {path: size for _, path, size in old}, old[-1][0] + HOUR_MS if old else 0


def hour_ms(file: str) -> int:
    """Return the begin of the hour that a file's folder is named after.

    >>> hour_ms("hour=1970-01-01T02/part-0.parquet")
    7200000
    """
    begin = datetime.strptime(value_of(file), HOUR_FORMAT).replace(tzinfo=UTC)
    return round(begin.timestamp()) * 1000


def _newest_arrival_ms(actions: pa.Table) -> int:
    """Return when the newest record arrived, by the statistics in the log; 0 if they do not have it."""
    if "max.arrival_time" not in actions.column_names:
        return 0
    newest: datetime | None = pc.max(actions.column("max.arrival_time")).as_py()
    return ms_of(newest) if newest else 0
