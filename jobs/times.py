"""Times as users write and read them: ISO 8601, in UTC unless they have another offset."""

from datetime import UTC, datetime, timedelta

from jobs.refusal import Refusal

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_time(text: str) -> int:
    """Milliseconds since 1970 of an ISO 8601 time. A time without an offset is in UTC.

    >>> parse_time("1970-01-01T00:01:00")
    60000
    >>> parse_time("1970-01-01T01:01:00+01:00")
    60000
    """
    try:
        moment = aware(datetime.fromisoformat(text)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise Refusal(f"{text!r} is no ISO 8601 time: write e.g. 2026-01-31T12:00:00Z") from error
    return round(moment.timestamp() * 1000)


def aware(moment: datetime) -> datetime:
    """A moment with its time zone: UTC, if it has none.

    >>> aware(datetime(1970, 1, 1, 0, 1)).isoformat()
    '1970-01-01T00:01:00+00:00'
    """
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def ms_of(moment: datetime) -> int:
    """Milliseconds since 1970. A moment without a time zone is in UTC.

    >>> ms_of(datetime(1970, 1, 1, 0, 1))
    60000
    """
    return (aware(moment) - _EPOCH) // timedelta(milliseconds=1)


def utc(seconds: float) -> str:
    """Seconds since 1970 as text for people, in UTC.

    >>> utc(60.9)
    '1970-01-01 00:01:00'
    """
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%d %H:%M:%S")


def iso(time_ms: int) -> str:
    """Milliseconds since 1970 as ISO 8601 text, in UTC.

    >>> iso(60_001)
    '1970-01-01T00:01:00.001Z'
    """
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
