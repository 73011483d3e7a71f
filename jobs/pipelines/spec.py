"""What a source and a pipeline are: plain, frozen data, refused when it is written wrong.

Standard library only, so that DAGs, plugins, docs and jobs can all import it.
Every derived name (topic, table, checkpoint, DAG id) is derived here and nowhere else.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Self

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_EXACT_TYPE = re.compile(r"BIGINT|STRING|TIMESTAMP|DECIMAL\((\d{1,2}),(\d{1,2})\)")
_INEXACT = re.compile(r"\b(double|float|real)\b", re.IGNORECASE)
_AGGREGATE = re.compile(r"[a-z_]\w*\s*\(", re.IGNORECASE)
HOUR_MS = 3_600_000
_ONE_SELECT = re.compile(r"\s*SELECT\s", re.IGNORECASE)
_NOT_ROW_BY_ROW = re.compile(r"\b(distinct|union|intersect|except|group\s+by|limit)\b", re.IGNORECASE)
_JOIN = re.compile(r"\bjoin\b", re.IGNORECASE)
_READS = re.compile(r"\{\w+\}")
_QUOTED = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`""")
_TOKEN = re.compile(r"""('[^']*'|"[^"]*"|`[^`]*`)|\s+""")
# What every landed record and every live row has beside its own columns.
_OF_A_RECORD = (
    *("topic", "partition", "offset", "arrival_time", "event_time", "hour"),
    *("reason", "raw", "raw_key", "raw_headers"),
)
_OF_A_WINDOW = (
    *("window_start", "window_end", "slice", "finality", "version", "as_of", "epoch", "batch"),
    *("fingerprint", "offsets", "watermark"),
    # Of a final row and of a header; of a row that explains a difference.
    *("run", "final_slice", "header", "live", "final", "unexplained", "causes"),
)
# Where a live table keeps its rows about micro-batches, beside the slices of windows.
BATCHES_SLICE = "batches"
# Where a final table keeps the headers of a day's slices: this, and the day.
HEADERS_SLICE = "headers-"
# Where it keeps rows of many slices of a day in one file: this, the day, and a sign of their columns.
ROWS_SLICE = "rows-"


class RefusedDefinitionError(ValueError):
    """A definition that cannot hold its promises. The text names the way out."""


def _require(condition: bool, refusal: str) -> None:
    if not condition:
        raise RefusedDefinitionError(refusal)


def _check_name(what: str, name: str) -> None:
    _require(
        _NAME.fullmatch(name) is not None,
        f"{what} name={name!r} must match {_NAME.pattern}: it becomes a topic, a table and a DAG id",
    )


def _check_type(what: str, sql_type: str) -> None:
    exact = _EXACT_TYPE.fullmatch(sql_type)
    _require(
        exact is not None,
        f"{what} type={sql_type!r} is not one of BIGINT, STRING, TIMESTAMP, DECIMAL(p,s); "
        "a DOUBLE gives another last digit in another order: use DECIMAL(18,6)",
    )
    if exact and exact[1]:
        precision, scale = int(exact[1]), int(exact[2])
        _require(
            0 < precision <= 38 and scale <= precision,
            f"{what} type={sql_type!r}: precision goes from 1 to 38, scale from 0 to the precision",
        )


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        _require(name not in seen, f"{what} {name!r} is defined twice: rename one of the two")
        seen.add(name)


def _check_sql(what: str, text: str) -> None:
    """A first look at SQL text; Spark's own analysis follows in the plan."""
    depth, quote = 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"`":
            quote = char
        elif char in "()":
            depth += 1 if char == "(" else -1
            _require(depth >= 0, f"{what} is not SQL, a ')' has no '(': {text!r}")
    _require(bool(text.strip()), f"{what} is empty: write a Spark SQL expression")
    _require(not quote, f"{what} is not SQL, a {quote} is not closed: {text!r}")
    _require(depth == 0, f"{what} is not SQL, a '(' is not closed: {text!r}")
    _require(";" not in text, f"{what} holds a ';': write one expression, not a script: {text!r}")


def _one_space(sql: str) -> str:
    """White space between tokens means nothing; between quotes it does."""
    return _TOKEN.sub(lambda token: token[1] or " ", sql).strip()


def _joins(transform: str) -> bool:
    """Whether it reads more than one source once; what stands between quotes does not count."""
    bare = _QUOTED.sub("", transform)
    return _JOIN.search(bare) is not None or len(_READS.findall(bare)) > 1


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
        """Refuse names and types that cannot hold."""
        _check_name("field", self.name)
        _check_type(f"field {self.name!r}", self.type)
        _require(
            self.type != "TIMESTAMP",
            f"field {self.name!r} type='TIMESTAMP': records have their times as epoch milliseconds; use BIGINT",
        )


@dataclass(frozen=True, kw_only=True)
class Topic:
    """A topic as it should be. ``moves_keys``: growing it would send a key to another partition."""

    name: str
    partitions: int
    configs: tuple[tuple[str, str], ...]
    moves_keys: bool


# A record is appended here whenever somebody has to know what time it is by the broker; nobody reads them.
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
# A machine whose clock differs from the broker's by more plans, publishes and streams nothing.
CLOCK_TOLERANCE_MS = 30_000


@dataclass(frozen=True, kw_only=True)
class Source:
    """A Kafka topic with a schema, a format and an event time.

    Event time is the field ``event_time_field``, or (plain text) the header ``event_time_header``, in
    milliseconds since the epoch. ``key`` names the column that holds the record's Kafka key; ``keyed`` says whether
    producers use keys at all, so that a new partition would take some of them away from theirs.
    ``identity`` names the fields that make two records the same; without it repeats count. What was landed is kept for
    ``events_kept_days``, and can be computed again for so long.
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
        """Refuse a source that could not be read, or not be read again after an outage."""
        _check_name("source", self.name)
        names = [field.name for field in self.fields]
        _check_unique(f"source {self.name!r}: column", [*names, *([self.key] if self.key else [])])
        _require(bool(names), f"source {self.name!r} has no fields: name at least one")
        self._check_event_time()
        taken = [field.name for field in self.columns if field.name in _OF_A_RECORD]
        _require(
            not taken, f"source {self.name!r}: columns {taken} are what every landed record has already: rename them"
        )
        unknown = set(self.identity) - set(names)
        _require(not unknown, f"source {self.name!r}: identity={sorted(unknown)} names no field; fields={names}")
        for setting in ("partitions", "horizon_hours", "longest_outage_hours"):
            value = getattr(self, setting)
            _require(value > 0, f"source {self.name!r}: {setting}={value} must be positive")
        _require(
            self.max_ahead_seconds >= 0,
            f"source {self.name!r}: max_ahead_seconds={self.max_ahead_seconds} must not be negative",
        )
        _require(
            self.retention_hours >= self.longest_outage_hours,
            f"source {self.name!r}: retention_hours={self.retention_hours} is shorter than "
            f"longest_outage_hours={self.longest_outage_hours}: records would be gone before they are read; "
            "keep the topic longer or accept a shorter outage",
        )
        needed_hours = self.horizon_hours + self.longest_outage_hours + self.retention_hours
        _require(
            self.events_kept_days * 24 >= needed_hours,
            f"source {self.name!r}: events_kept_days={self.events_kept_days} is shorter than horizon_hours="
            f"{self.horizon_hours}, longest_outage_hours={self.longest_outage_hours} and retention_hours="
            f"{self.retention_hours} together: events that can still come would belong to slices whose other events "
            f"are gone; keep them for {-(-needed_hours // 24)} days at least",
        )

    def _check_event_time(self) -> None:
        if self.format is Format.TEXT:
            _require(
                self.event_time_field is None and len(self.fields) == 1 and self.fields[0].type == "STRING",
                f"source {self.name!r}: plain text is one STRING field, its event time is a header or the arrival",
            )
            _require(
                re.fullmatch(r"[\w.-]+", self.event_time_header or "ts", re.ASCII) is not None,
                f"source {self.name!r}: event_time_header={self.event_time_header!r} is no name of a header: use "
                "letters, digits and . _ -",
            )
            return
        _require(
            self.event_time_header is None,
            f"source {self.name!r}: event_time_header is for plain text; here event_time_field names the event time",
        )
        times = [field.type for field in self.fields if field.name == self.event_time_field]
        _require(
            times == ["BIGINT"],
            f"source {self.name!r}: event_time_field={self.event_time_field!r} must name a BIGINT field "
            "(milliseconds since the epoch)",
        )

    @property
    def columns(self) -> tuple[Field, ...]:
        """What a landed record has beside topic, partition, offset, arrival and event time."""
        key = (Field(name=self.key, type="STRING"),) if self.key else ()
        return key + tuple(field for field in self.fields if field.name != self.event_time_field)

    @property
    def topic(self) -> Topic:
        """The source topic: the broker's clock stamps arrival, the bounds on event time rest on it."""
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
        """Where `ingest` lands it, below the lake's root."""
        return f"events/{self.name}"

    @property
    def events_relation(self) -> str:
        """Its accepted records, in queries."""
        return f"events_{self.name}"

    @property
    def quarantine_relation(self) -> str:
        """Its rejected records, in queries."""
        return f"quarantine_{self.name}"


class WindowKind(StrEnum):
    """How windows lie on the time axis."""

    TUMBLING = "tumbling"
    SLIDING = "sliding"
    SESSION = "session"


@dataclass(frozen=True, kw_only=True)
class Window:
    """What an aggregation groups by. Write one with `tumbling`, `sliding` or `session`."""

    kind: WindowKind
    size_ms: int
    slide_ms: int

    @classmethod
    def tumbling(cls, *, size_ms: int) -> Self:
        """Windows that touch: each event falls into one."""
        return cls(kind=WindowKind.TUMBLING, size_ms=size_ms, slide_ms=size_ms)

    @classmethod
    def sliding(cls, *, size_ms: int, slide_ms: int) -> Self:
        """Windows of ``size_ms`` that start every ``slide_ms``: each event falls into size / slide."""
        return cls(kind=WindowKind.SLIDING, size_ms=size_ms, slide_ms=slide_ms)

    @classmethod
    def session(cls, *, gap_ms: int, longest_ms: int) -> Self:
        """Windows that end after ``gap_ms`` without an event, ``longest_ms`` at most."""
        return cls(kind=WindowKind.SESSION, size_ms=longest_ms, slide_ms=gap_ms)

    def __post_init__(self) -> None:
        """Refuse windows that leave gaps or share no grid."""
        _require(0 < self.slide_ms <= self.size_ms, f"window: 0 < slide_ms={self.slide_ms} <= size_ms={self.size_ms}")
        _require(
            self.kind is not WindowKind.SLIDING or self.size_ms % self.slide_ms == 0,
            f"window: size_ms={self.size_ms} is no multiple of slide_ms={self.slide_ms}: "
            "an event would fall into more windows at some times than at others",
        )

    @property
    def reach_ms(self) -> int:
        """How far past its slice a window may extend."""
        return self.size_ms if self.kind is WindowKind.SESSION else self.size_ms - self.slide_ms

    @property
    def look_back_ms(self) -> int:
        """How far before its slice an event may lie that changes a window of the slice."""
        return self.size_ms if self.kind is WindowKind.SESSION else 0


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A Spark SQL aggregate over the transformed columns, and the exact type of its value."""

    name: str
    sql: str
    type: str

    def __post_init__(self) -> None:
        """Refuse what is no aggregate or would not be exact."""
        _check_name("measure", self.name)
        _check_sql(f"measure {self.name!r}", self.sql)
        _check_type(f"measure {self.name!r}", self.type)
        _require(
            _AGGREGATE.search(self.sql) is not None,
            f"measure {self.name!r}: sql={self.sql!r} aggregates nothing: write e.g. sum(value) or count(*)",
        )
        _require(
            _INEXACT.search(self.sql) is None,
            f"measure {self.name!r}: sql={self.sql!r} goes through a DOUBLE, whose last digit depends on the order "
            "of the records: sum integers or DECIMALs",
        )


class Severity(StrEnum):
    """What a failed check does: block the publish, or report."""

    CRITICAL = "critical"
    WARNING = "warning"


@dataclass(frozen=True, kw_only=True)
class Check:
    """What must hold for a column of the result: never null, and within bounds where given."""

    column: str
    minimum: int | None = None
    maximum: int | None = None
    severity: Severity = Severity.CRITICAL

    def __post_init__(self) -> None:
        """Refuse bounds that nothing can meet."""
        _require(
            self.minimum is None or self.maximum is None or self.minimum <= self.maximum,
            f"check on {self.column!r}: minimum={self.minimum} is above maximum={self.maximum}",
        )
        bounds = [bound for bound in (self.minimum, self.maximum) if bound is not None]
        _require(
            all(-(2**63) <= bound < 2**63 for bound in bounds),
            f"check on {self.column!r}: bounds {bounds} go beyond a BIGINT: leave out what nothing can exceed",
        )


@dataclass(frozen=True, kw_only=True)
class View:
    """A relation over the pipeline's current windows, as SQL that Spark and DuckDB both read."""

    name: str
    sql: str

    def __post_init__(self) -> None:
        """Refuse what is no relation."""
        _check_name("view", self.name)
        _check_sql(f"view {self.name!r}", self.sql)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One definition for the streaming job and the batch recompute.

    ``transform`` is one Spark SQL SELECT over the source (named in braces) that keeps ``event_time``; ``keys`` are the
    columns it is grouped by, beside the window, of ``key_types`` (STRING if none is said). ``counts`` names the measure
    that counts every event once in each of its windows, if there is one: the audit compares it with what was landed. A
    final slice is reopened by more late events than ``reopen_rows``, or than this share of its events.
    """

    name: str
    description: str
    source: Source
    transform: str
    keys: tuple[str, ...]
    window: Window
    measures: tuple[Measure, ...]
    output: str
    checks: tuple[Check, ...] = ()
    views: tuple[View, ...] = ()
    slice_seconds: int = 300
    watermark_delay_seconds: int = 5
    allowed_lateness_seconds: int = 60
    key_types: tuple[str, ...] = ()
    counts: str | None = None
    reopen_rows: int = 1000
    reopen_share: float = 0.01

    def __post_init__(self) -> None:
        """Refuse a definition whose layers could not agree."""
        _check_name("pipeline", self.name)
        _check_name("output", self.output)
        _check_sql(f"pipeline {self.name!r}: transform", self.transform)
        _require(
            _ONE_SELECT.match(self.transform) is not None and _NOT_ROW_BY_ROW.search(self.transform) is None,
            f"pipeline {self.name!r}: transform must be one SELECT that works row by row, without DISTINCT, UNION or "
            f"GROUP BY, so that each row of it comes from one event: {self.transform!r}",
        )
        _require(
            f"{{{self.source.name}}}" in self.transform and "event_time" in self.transform,
            f"pipeline {self.name!r}: transform must select event_time FROM {{{self.source.name}}}: {self.transform!r}",
        )
        _require(
            not _joins(self.transform),
            f"pipeline {self.name!r}: transform joins records, and there are no joins yet: write a pipeline for each "
            f"source, or join the records before they reach a topic: {self.transform!r}",
        )
        _require(bool(self.measures), f"pipeline {self.name!r} has no measures: name at least one")
        self._check_columns()
        self._check_times()

    def _check_columns(self) -> None:
        _check_unique(f"pipeline {self.name!r}: column", [*_OF_A_WINDOW, *self.value_columns])
        unknown = [check.column for check in self.checks if check.column not in self.value_columns]
        _require(
            not unknown, f"pipeline {self.name!r}: checks on {unknown}, which are not in {list(self.value_columns)}"
        )
        types = dict(zip(self.value_columns, self.value_types, strict=False))
        for check in self.checks:
            bounded = check.minimum is not None or check.maximum is not None
            _require(
                not bounded or types[check.column].startswith(("BIGINT", "DECIMAL")),
                f"pipeline {self.name!r}: check on {check.column!r} has bounds, but it is no number",
            )
        _require(
            len(self.key_types) in (0, len(self.keys)),
            f"pipeline {self.name!r}: key_types={list(self.key_types)} must say one type for each of {list(self.keys)}",
        )
        for key_type in self.key_types:
            _check_type(f"pipeline {self.name!r}: key", key_type)
        _require(
            self.counts is None or any(m.name == self.counts and m.type == "BIGINT" for m in self.measures),
            f"pipeline {self.name!r}: counts={self.counts!r} names no BIGINT measure",
        )
        _require(
            self.reopen_rows >= 0 and 0 <= self.reopen_share <= 1,
            f"pipeline {self.name!r}: reopen_rows={self.reopen_rows} must not be negative, "
            f"reopen_share={self.reopen_share} goes from 0 to 1",
        )

    def _check_times(self) -> None:
        step = 1 if self.window.kind is WindowKind.SESSION else self.window.slide_ms
        _require(
            self.slice_seconds > 0 and self.slice_seconds * 1000 % step == 0,
            f"pipeline {self.name!r}: slice_seconds={self.slice_seconds} is no multiple of the window's "
            f"slide ({step} ms): a window would belong to two slices; choose a multiple",
        )
        outage_seconds = self.source.longest_outage_hours * 3600
        _require(
            self.source.retention_hours * 3600 >= outage_seconds + self.allowed_lateness_seconds,
            f"pipeline {self.name!r}: source {self.source.name!r} keeps records "
            f"{self.source.retention_hours} h, less than the longest outage ({self.source.longest_outage_hours} h) "
            f"plus allowed_lateness_seconds={self.allowed_lateness_seconds}: raise retention_hours",
        )
        _require(
            self.watermark_delay_seconds >= 0 and self.allowed_lateness_seconds >= self.watermark_delay_seconds,
            f"pipeline {self.name!r}: allowed_lateness_seconds={self.allowed_lateness_seconds} is less than "
            f"watermark_delay_seconds={self.watermark_delay_seconds}: a slice would close before the stream is done",
        )

    @property
    def value_columns(self) -> tuple[str, ...]:
        """Keys and measures, in the order in which every table and message has them."""
        return self.keys + tuple(measure.name for measure in self.measures)

    @property
    def value_types(self) -> tuple[str, ...]:
        """The SQL types of `value_columns`."""
        return (self.key_types or ("STRING",) * len(self.keys)) + tuple(measure.type for measure in self.measures)

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hex digits that change whenever the results could."""
        source = self.source
        meaning: list[Any] = [
            source.name,
            source.format,
            [[field.name, field.type] for field in source.fields],
            [source.event_time_field, source.event_time_header, source.key, source.identity],
            [source.horizon_hours, source.max_ahead_seconds],
            _one_space(self.transform),
            [*self.keys, *self.key_types],
            [self.window.kind, self.window.size_ms, self.window.slide_ms],
            [[measure.name, _one_space(measure.sql), measure.type] for measure in self.measures],
            [self.slice_seconds, self.watermark_delay_seconds, self.allowed_lateness_seconds],
        ]
        return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()[:12]

    @cached_property
    def checks_fingerprint(self) -> str:
        """Twelve hex digits that change whenever a verdict could, though the results do not."""
        meaning = [[[c.column, c.minimum, c.maximum, c.severity] for c in self.checks], self.counts]
        return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()[:12]

    @property
    def topic(self) -> Topic:
        """The output topic: compacted, so that the newest row of each window and key stays."""
        return Topic(
            name=self.output,
            partitions=self.source.partitions,
            configs=(("cleanup.policy", "compact"),),
            moves_keys=True,
        )

    @property
    def final_topic(self) -> Topic:
        """Where recompute sends what it has published."""
        return replace(self.topic, name=f"{self.output}.final")

    @property
    def live_table(self) -> str:
        """Where the live job appends, below the lake's root."""
        return f"live/{self.name}"

    @property
    def final_table(self) -> str:
        """Where recompute publishes."""
        return f"final/{self.name}"

    @property
    def ledger_table(self) -> str:
        """The history of each slice's states."""
        return f"ledger/{self.name}"

    @property
    def drift_table(self) -> str:
        """Where live and final differ, window by window."""
        return f"drift/{self.name}"

    @property
    def balance_table(self) -> str:
        """The same in totals: one account per slice and version."""
        return f"balance/{self.name}"

    @property
    def recompute_job(self) -> str:
        """The DAG that makes slices final, and the holder of the lease on `final` and `ledger`."""
        return f"recompute_{self.name}"

    @property
    def account_job(self) -> str:
        """The DAG that explains differences, and the holder of the lease on `drift`."""
        return f"account_{self.name}"

    @property
    def check_job(self) -> str:
        """The DAG that checks what is served."""
        return f"check_{self.name}"

    @property
    def asset(self) -> str:
        """The Airflow asset of which each published slice is a partition."""
        return f"windows/{self.name}"


def checkpoint_of(job: str, source: str | None = None) -> str:
    """The checkpoint folder of a streaming job below the lake's root; `ingest` has one per source."""
    return f"checkpoints/{job}/{source}" if source else f"checkpoints/{job}"


def control_of(job: str) -> str:
    """The control folder of a streaming job, below the lake's root."""
    return f"control/{job}"


# Incidents of all jobs; no job's name begins so.
INCIDENTS = "control/_incidents"


def dag_id_of(job: str) -> str:
    """The DAG that runs a streaming job."""
    return f"stream_{job}"
