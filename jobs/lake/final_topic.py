"""Final rows as messages of `<output>.final`, in the same format as the live job's messages of `<output>`."""

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from kafka import KafkaProducer

from jobs.broker.kafka import client_options
from jobs.lake.columns import columns_of
from jobs.lake.slices import Header
from jobs.pipelines.pipeline import Pipeline
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings

Message = tuple[bytes, bytes | None]

_BATCH_ROWS = 20_000
_SEND_SECONDS = 120.0
# Escapes as Spark's JSON writer makes them. Python's own would have lower-case hex digits.
_ESCAPES = {code: f"\\u{code:04X}" for code in range(32)} | {
    ord(char): f"\\{sign}" for char, sign in zip('"\\\b\t\n\f\r', '"\\btnfr', strict=True)
}


def messages(pipeline: Pipeline, header: Header, rows: pa.Table) -> Iterator[Message]:
    """Yield key and value of each final row. The key is the array of window_start and keys."""
    names = columns_of(pipeline).names
    tail = f'"finality":"final","version":{header.version},"as_of":{_json(_time(header.as_of_ms))}}}'.encode()
    for batch in rows.select(names).to_batches(_BATCH_ROWS):
        for row in batch.to_pylist():
            members = (f"{_json(name)}:{_json(value)}" for name, value in row.items() if value is not None)
            yield _key(pipeline, row), f"{{{','.join(members)},".encode() + tail


def tombstones(pipeline: Pipeline, old: pa.Table, new: pa.Table) -> Iterator[Message]:
    """Yield a tombstone for each window that the new version lacks. Without it, a compacted topic keeps the old row."""
    names = window_columns(pipeline)
    kept = {tuple(row.values()) for row in new.select(names).to_pylist()}
    for row in old.select(names).to_pylist():
        if tuple(row.values()) not in kept:
            yield _key(pipeline, row), None


def window_columns(pipeline: Pipeline) -> list[str]:
    """Return the columns that identify the window of a message."""
    return ["window_start", *pipeline.keys]


def send(kafka: KafkaSettings, topic: str, wanted: Iterable[Message]) -> int:
    """Send messages, wait until the broker has all of them, and return their number."""
    producer = KafkaProducer(**client_options(kafka), linger_ms=5, batch_size=256 * 1024)
    failed: list[BaseException] = []
    count = 0
    try:
        for key, value in wanted:
            producer.send(topic, value, key=key).add_errback(failed.append)
            count += 1
        producer.flush(timeout=_SEND_SECONDS)
    finally:
        producer.close()
    if failed:
        raise Refusal(
            f"Kafka did not take all {count} messages for {topic!r} ({failed[0]}): the next run sends them again"
        )
    return count


def _key(pipeline: Pipeline, row: dict[str, Any]) -> bytes:
    return f"[{','.join(_json(row[name]) for name in window_columns(pipeline))}]".encode()


def _json(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return f'"{value.translate(_ESCAPES)}"'
    if isinstance(value, datetime):
        moment = value.astimezone(UTC)
        return f'"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"'
    # Java and Python write decimals by the same rule.
    return str(value) if isinstance(value, Decimal) else json.dumps(value)


def _time(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
