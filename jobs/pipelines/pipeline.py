"""A pipeline: one definition for the streaming job and the batch recompute. Contradictory definitions are refused."""

import hashlib
import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jobs.pipelines.layout import HOUR_MS, recompute_job_of
from jobs.pipelines.rules import check_name, check_sql, check_type, check_unique, require
from jobs.pipelines.source import Source, Topic
from jobs.pipelines.window import Check, Measure, View, Window, WindowKind

_ONE_SELECT = re.compile(r"\s*SELECT\s", re.IGNORECASE)
_NOT_ROW_BY_ROW = re.compile(r"\b(distinct|union|intersect|except|group\s+by|limit)\b", re.IGNORECASE)
_JOIN = re.compile(r"\bjoin\b", re.IGNORECASE)
_READS = re.compile(r"\{\w+\}")
_QUOTED = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`""")
_QUOTED_OR_SPACE = re.compile(rf"({_QUOTED.pattern})|\s+")
_OF_A_WINDOW = (
    *("window_start", "window_end", "slice", "finality", "version", "as_of", "epoch", "batch"),
    *("fingerprint", "offsets", "watermark"),
    # Columns of final rows and headers, then columns of the rows that explain a difference.
    *("run", "final_slice", "header", "live", "final", "unexplained", "causes"),
)


def _joins(transform: str) -> bool:
    """Whether a transform reads several sources, or one source twice. Text between quotes does not count."""
    bare = _QUOTED.sub("", transform)
    return _JOIN.search(bare) is not None or len(_READS.findall(bare)) > 1


def _one_space(sql: str) -> str:
    """Replace each stretch of white space by one space, so that another layout gives the same fingerprint.

    White space between quotes stays, because it has a meaning there.
    """
    return _QUOTED_OR_SPACE.sub(lambda part: part[1] or " ", sql).strip()


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One definition for the streaming job and the batch recompute.

    ``transform`` is one Spark SQL SELECT over the source (named in braces) that keeps ``event_time``. Its rows are
    grouped by the window and by the columns ``keys``. ``key_types`` gives their types; without it, all are STRING.
    ``counts`` names the measure that counts every event once in each of its windows, if there is one: the audit
    compares it with the landed events. A final slice is reopened when it has more late events than ``reopen_rows``, or
    than the share ``reopen_share`` of its events. The output topics keep messages for ``output_kept_days``.
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
    output_kept_days: int = 90

    def __post_init__(self) -> None:
        """Refuse a definition with parts that contradict each other."""
        check_name("pipeline", self.name)
        check_name("output", self.output)
        check_sql(f"pipeline {self.name!r}: transform", self.transform)
        require(
            _ONE_SELECT.match(self.transform) is not None and _NOT_ROW_BY_ROW.search(self.transform) is None,
            f"pipeline {self.name!r}: transform must be one SELECT that works row by row, without DISTINCT, UNION or "
            f"GROUP BY, so that each row of it comes from one event: {self.transform!r}",
        )
        require(
            f"{{{self.source.name}}}" in self.transform and "event_time" in self.transform,
            f"pipeline {self.name!r}: transform must select event_time FROM {{{self.source.name}}}: {self.transform!r}",
        )
        require(
            not _joins(self.transform),
            f"pipeline {self.name!r}: transform joins records, and there are no joins yet: write a pipeline for each "
            f"source, or join the records before they reach a topic: {self.transform!r}",
        )
        require(bool(self.measures), f"pipeline {self.name!r} has no measures: name at least one")
        require(
            self.output_kept_days > 0,
            f"pipeline {self.name!r}: output_kept_days={self.output_kept_days} must be positive",
        )
        self._check_columns()
        self._check_times()

    def _check_columns(self) -> None:
        check_unique(f"pipeline {self.name!r}: column", [*_OF_A_WINDOW, *self.value_columns])
        unknown = [check.column for check in self.checks if check.column not in self.value_columns]
        require(
            not unknown,
            f"pipeline {self.name!r}: checks on {unknown}, which are no columns; columns={list(self.value_columns)}",
        )
        types = dict(zip(self.value_columns, self.value_types, strict=False))
        for check in self.checks:
            bounded = check.minimum is not None or check.maximum is not None
            require(
                not bounded or types[check.column].startswith(("BIGINT", "DECIMAL")),
                f"pipeline {self.name!r}: check on {check.column!r} has bounds, but it is no number",
            )
        require(
            len(self.key_types) in (0, len(self.keys)),
            f"pipeline {self.name!r}: key_types={list(self.key_types)} must give a type for each of {list(self.keys)}",
        )
        for key_type in self.key_types:
            check_type(f"pipeline {self.name!r}: key", key_type)
        require(
            self.counts is None or any(m.name == self.counts and m.type == "BIGINT" for m in self.measures),
            f"pipeline {self.name!r}: counts={self.counts!r} names no BIGINT measure",
        )
        require(
            self.reopen_rows >= 0 and 0 <= self.reopen_share <= 1,
            f"pipeline {self.name!r}: reopen_rows={self.reopen_rows} must not be negative, "
            f"reopen_share={self.reopen_share} must be from 0 to 1",
        )

    def _check_times(self) -> None:
        step = 1 if self.window.kind is WindowKind.SESSION else self.window.slide_ms
        require(
            self.slice_seconds > 0 and self.slice_seconds * 1000 % step == 0,
            f"pipeline {self.name!r}: slice_seconds={self.slice_seconds} is no multiple of the window's "
            f"slide ({step} ms): a window would belong to two slices; choose a multiple",
        )
        outage_seconds = self.source.longest_outage_hours * 3600
        require(
            self.source.retention_hours * 3600 >= outage_seconds + self.allowed_lateness_seconds,
            f"pipeline {self.name!r}: source {self.source.name!r} keeps records "
            f"{self.source.retention_hours} h, less than the longest outage ({self.source.longest_outage_hours} h) "
            f"plus allowed_lateness_seconds={self.allowed_lateness_seconds}: raise retention_hours",
        )
        require(
            self.watermark_delay_seconds >= 0 and self.allowed_lateness_seconds >= self.watermark_delay_seconds,
            f"pipeline {self.name!r}: allowed_lateness_seconds={self.allowed_lateness_seconds} is less than "
            f"watermark_delay_seconds={self.watermark_delay_seconds}: a slice would close before the stream is done",
        )

    @property
    def value_columns(self) -> tuple[str, ...]:
        """Keys and measures, in the order that every table and message uses."""
        return self.keys + tuple(measure.name for measure in self.measures)

    @property
    def value_types(self) -> tuple[str, ...]:
        """The SQL types of `value_columns`."""
        return (self.key_types or ("STRING",) * len(self.keys)) + tuple(measure.type for measure in self.measures)

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hex digits that change when the definition would give other results."""
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
        """Twelve hex digits that change when the same results could get another verdict."""
        meaning = [[[c.column, c.minimum, c.maximum, c.severity] for c in self.checks], self.counts]
        return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()[:12]

    @property
    def topic(self) -> Topic:
        """The output topic: it keeps the newest row of each window and key, for `output_kept_days`.

        Each window has keys of its own, so compaction alone would never delete the rows of old windows. The broker's
        clock stamps messages, because it also decides when they are old.
        """
        return Topic(
            name=self.output,
            partitions=self.source.partitions,
            configs=(
                ("cleanup.policy", "compact,delete"),
                ("message.timestamp.type", "LogAppendTime"),
                ("retention.ms", str(self.output_kept_days * 24 * HOUR_MS)),
            ),
            moves_keys=True,
        )

    @property
    def final_topic(self) -> Topic:
        """The topic to which published rows are sent."""
        return replace(self.topic, name=f"{self.output}.final")

    @property
    def live_table(self) -> str:
        """The table of live rows, written by the live job, below the lake's root."""
        return f"live/{self.name}"

    @property
    def final_table(self) -> str:
        """The table of final rows, written by the publish step."""
        return f"final/{self.name}"

    @property
    def ledger_table(self) -> str:
        """The history of each slice's states."""
        return f"ledger/{self.name}"

    @property
    def drift_table(self) -> str:
        """The table of differences between live and final, window by window."""
        return f"drift/{self.name}"

    @property
    def balance_table(self) -> str:
        """The table of differences in totals, with one account for each version of a slice."""
        return f"balance/{self.name}"

    @property
    def recompute_job(self) -> str:
        """The DAG that makes slices final, and the holder of the lease on `final` and `ledger`."""
        return recompute_job_of(self.name)

    @property
    def account_job(self) -> str:
        """The DAG that explains differences, and the holder of the lease on `drift`."""
        return f"account_{self.name}"

    @property
    def check_job(self) -> str:
        """The DAG that checks the served windows."""
        return f"check_{self.name}"

    @property
    def asset(self) -> str:
        """The Airflow asset; each published slice is one of its partitions."""
        return f"windows/{self.name}"
