"""A source: a Kafka topic with a schema, a format and an event time."""

import re
from dataclasses import dataclass
from enum import StrEnum

from jobs.pipelines.layout import HOUR_MS
from jobs.pipelines.rules import check_name, check_type, check_unique, require

# The columns that every landed record has beside those of its source.
_OF_A_RECORD = (
    *("topic", "partition", "offset", "arrival_time", "event_time", "hour"),
    *("reason", "raw", "raw_key", "raw_headers"),
)


class Format(StrEnum):
    """How the bytes of a record's value are written."""

    JSON = "json"
    CSV = "csv"
    TEXT = "text"


@dataclass(frozen=True, kw_only=True)
class Field:
    """A column of a source and its exact SQL type. Every field is required in every record."""

    name: str
    type: str

    def __post_init__(self) -> None:
        """Refuse a name or type that a field cannot have."""
        check_name("field", self.name)
        check_type(f"field {self.name!r}", self.type)
        require(
            self.type != "TIMESTAMP",
            f"field {self.name!r} type='TIMESTAMP': records have their times as epoch milliseconds; use BIGINT",
        )


@dataclass(frozen=True, kw_only=True)
class Topic:
    """The wanted state of a topic. ``moves_keys``: new partitions would send some keys to another partition."""

    name: str
    partitions: int
    configs: tuple[tuple[str, str], ...]
    moves_keys: bool


# A job appends a record here to get the broker's clock from its stamp. No job reads these records.
CLOCK = Topic(
    name="tideline.clock",
    partitions=1,
    configs=(
        ("cleanup.policy", "delete"),
        ("message.timestamp.type", "LogAppendTime"),
        ("retention.bytes", "1048576"),
        ("retention.ms", str(HOUR_MS)),
        ("segment.bytes", "1048576"),
    ),
    moves_keys=False,
)
# If a machine's clock differs from the broker's by more than this, the machine plans, publishes and streams nothing.
CLOCK_TOLERANCE_MS = 30_000


@dataclass(frozen=True, kw_only=True)
class Source:
    """A Kafka topic with a schema, a format and an event time.

    Event time is the field ``event_time_field``, or (plain text) the header ``event_time_header``, in
    milliseconds since the epoch. ``key`` names the column that holds the record's Kafka key. ``keyed`` says whether
    producers use keys at all: if they do, a new partition would take some keys away from their partitions.
    ``identity`` names the fields that make two records the same; without it, repeats count. Landed records are kept
    for ``events_kept_days``, and slices can be computed again for as long.
    """

    name: str
    description: str
    format: Format
    fields: tuple[Field, ...]
    event_time_field: str | None = None
    event_time_header: str | None = None
    key: str | None = None
    keyed: bool = True
    identity: tuple[str, ...] = ()
    partitions: int = 3
    retention_hours: int = 168
    longest_outage_hours: int = 72
    horizon_hours: int = 168
    max_ahead_seconds: int = 60
    events_kept_days: int = 90

    def __post_init__(self) -> None:
        """Refuse a source that could not be read, or could not be read again after an outage."""
        check_name("source", self.name)
        names = [field.name for field in self.fields]
        check_unique(f"source {self.name!r}: column", [*names, *([self.key] if self.key else [])])
        require(bool(names), f"source {self.name!r} has no fields: name at least one")
        self._check_event_time()
        taken = [field.name for field in self.columns if field.name in _OF_A_RECORD]
        require(not taken, f"source {self.name!r}: every landed record has columns {taken} already: rename them")
        unknown = set(self.identity) - set(names)
        require(not unknown, f"source {self.name!r}: identity={sorted(unknown)} names no field; fields={names}")
        for setting in ("partitions", "horizon_hours", "longest_outage_hours"):
            value = getattr(self, setting)
            require(value > 0, f"source {self.name!r}: {setting}={value} must be positive")
        require(
            self.max_ahead_seconds >= 0,
            f"source {self.name!r}: max_ahead_seconds={self.max_ahead_seconds} must not be negative",
        )
        require(
            self.retention_hours >= self.longest_outage_hours,
            f"source {self.name!r}: retention_hours={self.retention_hours} is shorter than "
            f"longest_outage_hours={self.longest_outage_hours}: records would be gone before they are read; "
            "keep the topic longer or accept a shorter outage",
        )
        needed_hours = self.horizon_hours + self.longest_outage_hours + self.retention_hours
        require(
            self.events_kept_days * 24 >= needed_hours,
            f"source {self.name!r}: events_kept_days={self.events_kept_days} is shorter than horizon_hours="
            f"{self.horizon_hours}, longest_outage_hours={self.longest_outage_hours} and retention_hours="
            f"{self.retention_hours} together: a late event could belong to a slice whose other events were removed; "
            f"set events_kept_days={-(-needed_hours // 24)} or more",
        )

    def _check_event_time(self) -> None:
        if self.format is Format.TEXT:
            require(
                self.event_time_field is None and len(self.fields) == 1 and self.fields[0].type == "STRING",
                f"source {self.name!r}: plain text has one STRING field, and its event time is a header or the arrival",
            )
            require(
                re.fullmatch(r"[\w.-]+", self.event_time_header or "ts", re.ASCII) is not None,
                f"source {self.name!r}: event_time_header={self.event_time_header!r} is no name of a header: use "
                "letters, digits and . _ -",
            )
            return
        require(
            self.event_time_header is None,
            f"source {self.name!r}: event_time_header is for plain text; here event_time_field names the event time",
        )
        times = [field.type for field in self.fields if field.name == self.event_time_field]
        require(
            times == ["BIGINT"],
            f"source {self.name!r}: event_time_field={self.event_time_field!r} must name a BIGINT field "
            "(milliseconds since the epoch)",
        )

    @property
    def columns(self) -> tuple[Field, ...]:
        """The columns of a landed record beside topic, partition, offset, arrival and event time."""
        key = (Field(name=self.key, type="STRING"),) if self.key else ()
        return key + tuple(field for field in self.fields if field.name != self.event_time_field)

    @property
    def topic(self) -> Topic:
        """The source topic. The broker's clock stamps arrivals, because the bounds on event time refer to them."""
        return Topic(
            name=self.name,
            partitions=self.partitions,
            configs=(
                ("cleanup.policy", "delete"),
                ("message.timestamp.type", "LogAppendTime"),
                ("retention.ms", str(self.retention_hours * HOUR_MS)),
            ),
            moves_keys=self.keyed,
        )

    @property
    def events_table(self) -> str:
        """The table into which `ingest` lands its records, below the lake's root."""
        return f"events/{self.name}"

    @property
    def events_relation(self) -> str:
        """The name of its accepted records in queries."""
        return f"events_{self.name}"

    @property
    def quarantine_relation(self) -> str:
        """The name of its rejected records in queries."""
        return f"quarantine_{self.name}"
