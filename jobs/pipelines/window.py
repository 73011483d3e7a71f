"""The parts of a pipeline: windows, measures, checks and views."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from jobs.pipelines.rules import check_name, check_sql, check_type, require

_INEXACT = re.compile(r"\b(double|float|real)\b", re.IGNORECASE)
_AGGREGATE = re.compile(r"[a-z_]\w*\s*\(", re.IGNORECASE)


class WindowKind(StrEnum):
    """How windows lie on the time axis."""

    TUMBLING = "tumbling"
    SLIDING = "sliding"
    SESSION = "session"


@dataclass(frozen=True, kw_only=True)
class Window:
    """How an aggregation groups events by time. Create one with `tumbling`, `sliding` or `session`.

    For session windows, ``slide_ms`` is the gap, and ``size_ms`` the longest length.
    """

    kind: WindowKind
    size_ms: int
    slide_ms: int

    @classmethod
    def tumbling(cls, *, size_ms: int) -> Self:
        """Adjacent windows: each event falls into exactly one."""
        return cls(kind=WindowKind.TUMBLING, size_ms=size_ms, slide_ms=size_ms)

    @classmethod
    def sliding(cls, *, size_ms: int, slide_ms: int) -> Self:
        """Windows of ``size_ms`` that start every ``slide_ms``: each event falls into size / slide windows."""
        return cls(kind=WindowKind.SLIDING, size_ms=size_ms, slide_ms=slide_ms)

    @classmethod
    def session(cls, *, gap_ms: int, longest_ms: int) -> Self:
        """Windows that end after ``gap_ms`` without an event, and are at most ``longest_ms`` long."""
        return cls(kind=WindowKind.SESSION, size_ms=longest_ms, slide_ms=gap_ms)

    def __post_init__(self) -> None:
        """Refuse windows that leave gaps, and sliding windows with a size that is no multiple of the slide."""
        require(
            0 < self.slide_ms <= self.size_ms,
            f"window: slide_ms={self.slide_ms} must be more than 0, and not more than size_ms={self.size_ms}",
        )
        require(
            self.kind is not WindowKind.SLIDING or self.size_ms % self.slide_ms == 0,
            f"window: size_ms={self.size_ms} is no multiple of slide_ms={self.slide_ms}: "
            "an event would fall into more windows at some times than at others",
        )

    @property
    def reach_ms(self) -> int:
        """How far a window may extend past the end of its slice.

        >>> Window.tumbling(size_ms=1_000).reach_ms
        0
        >>> Window.sliding(size_ms=1_000, slide_ms=250).reach_ms
        750
        """
        return self.size_ms if self.kind is WindowKind.SESSION else self.size_ms - self.slide_ms

    @property
    def look_back_ms(self) -> int:
        """How far before a slice an event may lie and still change a window of the slice.

        >>> Window.sliding(size_ms=1_000, slide_ms=250).look_back_ms
        0
        >>> Window.session(gap_ms=30_000, longest_ms=600_000).look_back_ms
        600000
        """
        return self.size_ms if self.kind is WindowKind.SESSION else 0


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A Spark SQL aggregate over the transformed columns, and the exact type of its value."""

    name: str
    sql: str
    type: str

    def __post_init__(self) -> None:
        """Refuse SQL that aggregates nothing or gives inexact values."""
        check_name("measure", self.name)
        check_sql(f"measure {self.name!r}", self.sql)
        check_type(f"measure {self.name!r}", self.type)
        require(
            _AGGREGATE.search(self.sql) is not None,
            f"measure {self.name!r}: sql={self.sql!r} aggregates nothing: write e.g. sum(value) or count(*)",
        )
        require(
            _INEXACT.search(self.sql) is None,
            f"measure {self.name!r}: sql={self.sql!r} computes with a DOUBLE, whose last digit depends on the order "
            "of the records: sum integers or DECIMALs",
        )


class Severity(StrEnum):
    """The effect of a failed check: it blocks the publish, or it is only reported."""

    CRITICAL = "critical"
    WARNING = "warning"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A rule for a column of the result: never null, and within the bounds if they are given."""

    column: str
    minimum: int | None = None
    maximum: int | None = None
    severity: Severity = Severity.CRITICAL

    def __post_init__(self) -> None:
        """Refuse bounds that no value can meet, and bounds beyond a BIGINT."""
        require(
            self.minimum is None or self.maximum is None or self.minimum <= self.maximum,
            f"check on {self.column!r}: minimum={self.minimum} is above maximum={self.maximum}",
        )
        bounds = [bound for bound in (self.minimum, self.maximum) if bound is not None]
        require(
            all(-(2**63) <= bound < 2**63 for bound in bounds),
            f"check on {self.column!r}: bounds {bounds} do not fit into a BIGINT: leave out what no value can exceed",
        )


@dataclass(frozen=True, kw_only=True)
class View:
    """A relation over the pipeline's current windows, as SQL that Spark and DuckDB both read."""

    name: str
    sql: str

    def __post_init__(self) -> None:
        """Refuse a name or SQL text that cannot become a relation."""
        check_name("view", self.name)
        check_sql(f"view {self.name!r}", self.sql)
