"""The right answers, in plain Python: slow, obvious, and written independently of the product's code."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from kafka import KafkaConsumer, TopicPartition

HORIZON_MS = 7 * 24 * 3600 * 1000
MAX_AHEAD_MS = 60_000


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record as a consumer sees it."""

    partition: int = 0
    offset: int = 0
    arrival_ms: int
    key: bytes | None = b"k"
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


@dataclass(frozen=True)
class Event:
    """An accepted record."""

    event_ms: int
    columns: dict[str, Any]
    record: Record


def read_topic(bootstrap: str, topic: str) -> list[Record]:
    """All committed records of a topic."""
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed", enable_auto_commit=False)
    try:
        partitions = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic) or ()]
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        ends = consumer.end_offsets(partitions)
        found = []
        while any(consumer.position(at) < end for at, end in ends.items()):
            for at, records in consumer.poll(timeout_ms=1000).items():
                found += [
                    Record(
                        partition=at.partition,
                        offset=record.offset,
                        arrival_ms=record.timestamp,
                        key=record.key,
                        value=record.value,
                        headers=tuple(record.headers),
                    )
                    for record in records
                ]
        return found
    finally:
        consumer.close()


def accept(source: str, record: Record) -> Event | None:
    """The event, or None if the record must be rejected."""
    read = {"numbers": _number, "lines": _line, "clicks": _click, "orders": _order}[source]
    try:
        event_ms, columns = read(record)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    age = record.arrival_ms - event_ms
    return Event(event_ms, columns, record) if -MAX_AHEAD_MS <= age <= HORIZON_MS else None


def _object(value: bytes | None) -> dict[str, Any]:
    def no_constant(name: str) -> None:
        raise ValueError(name)

    def unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(members)) < len(members):
            raise ValueError("a name is repeated")
        return dict(members)

    text = (value or b"").decode("utf-8")
    document = json.loads(text, parse_float=Decimal, parse_constant=no_constant, object_pairs_hook=unique)
    if type(document) is not dict:
        raise ValueError("no object")
    return document


def _whole(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError("no BIGINT")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("no string")
    return value


def _money(value: Any) -> Decimal:
    if type(value) not in (int, Decimal):
        raise ValueError("no number")
    number = Decimal(value)
    if not number.is_finite() or number.adjusted() >= 12 or number != number.quantize(Decimal("0.000001")):
        raise ValueError("no DECIMAL(18,6)")
    return number


def _number(record: Record) -> tuple[int, dict[str, Any]]:
    document = _object(record.value)
    if record.key is None:
        raise ValueError("no key")
    columns = {"key": record.key.decode("utf-8"), "id": _whole(document["id"]), "value": _money(document["value"])}
    return _whole(document["ts"]), columns


def _click(record: Record) -> tuple[int, dict[str, Any]]:
    document = _object(record.value)
    return _whole(document["ts"]), {"user": _text(document["user"]), "page": _text(document["page"])}


def _order(record: Record) -> tuple[int, dict[str, Any]]:
    document = _object(record.value)
    names = {"order_id": _text(document["order_id"]), "customer": _text(document["customer"])}
    return _whole(document["ts"]), {**names, "amount": _money(document["amount"])}


def _line(record: Record) -> tuple[int, dict[str, Any]]:
    if record.value is None:
        raise ValueError("null")
    stamps = [value for name, value in record.headers if name == "ts"]
    if not stamps:
        return record.arrival_ms, {"text": record.value.decode("utf-8")}
    if stamps[-1] is None or not re.fullmatch(rb"-?[0-9]+", stamps[-1]):
        raise ValueError("no time")
    return int(stamps[-1]), {"text": record.value.decode("utf-8")}


def windows_of(event_ms: int, size_ms: int, slide_ms: int) -> Iterator[int]:
    """The starts of the windows that an event falls into."""
    start = event_ms - event_ms % slide_ms
    while start > event_ms - size_ms:
        yield start
        start -= slide_ms


@dataclass
class State:
    """Running totals of one window and key."""

    total: Decimal = Decimal(0)
    events: int = 0

    def row(self) -> dict[str, Any]:
        """The measures of the rolling sums. The mean is rounded as Spark divides, then as its column is rounded."""
        mean = (self.total / self.events).quantize(Decimal(1).scaleb(-16), ROUND_HALF_UP)
        return {
            "total": self.total.quantize(Decimal("0.000001")),
            "mean": mean.quantize(Decimal(1).scaleb(-10), ROUND_HALF_UP),
            "events": self.events,
        }


def contributions(pipeline: str, event: Event) -> list[tuple[str, Decimal]]:
    """The (key, amount) pairs that an event adds."""
    if pipeline.startswith("rolling_sum"):
        return [(event.columns["key"], event.columns["value"])]
    return [(word, Decimal(0)) for word in re.split(r"\W+", event.columns["text"].lower()) if word]


SHAPES = {"rolling_sum": (1000, 1000), "rolling_sum_sliding": (1000, 250), "word_count": (60_000, 60_000)}
SOURCE_OF = {"rolling_sum": "numbers", "rolling_sum_sliding": "numbers", "word_count": "lines"}


def measures(pipeline: str, state: State) -> dict[str, Any]:
    """The measures of a row, named as in the pipeline."""
    return {"occurrences": state.events} if pipeline == "word_count" else state.row()


def aggregate(pipeline: str, events: Iterable[Event]) -> dict[tuple[int, str], dict[str, Any]]:
    """(window start, key) -> measures, over all the events."""
    states: dict[tuple[int, str], State] = defaultdict(State)
    for event in events:
        for start in windows_of(event.event_ms, *SHAPES[pipeline]):
            for key, amount in contributions(pipeline, event):
                states[start, key].total += amount
                states[start, key].events += 1
    return {at: measures(pipeline, state) for at, state in states.items()}
