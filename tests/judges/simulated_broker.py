"""The source's topic in memory, and its landed records: partitions, brokers' clocks, re-created topics."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kafka import TopicPartition
from kafka.admin import OffsetSpec

# The most by which the brokers' clocks differ here. `slices.CLOCK_SKEW_MS` is the most that the product allows for.
SKEW_MS = 5_000


@dataclass(frozen=True, kw_only=True)
class Record:
    """An event. ``topic`` counts the topics of this name: a re-created one has the next number."""

    topic: int
    partition: int
    offset: int
    time: int
    arrival: int


@dataclass(frozen=True, kw_only=True)
class Note:
    """The note of the newest commit of `events`: the number of landed records, the topic, and its offsets so far."""

    landed: int
    topic: int
    ends: Mapping[int, int]


def id_of(topic: int) -> str:
    """The id of a topic."""
    return f"t{topic}"


def number_of(topic_id: str) -> int:
    """The number of a topic."""
    return int(topic_id.removeprefix("t"))


@dataclass
class Broker:
    """The records of the topic as it is now, and the landed records of all topics, in the order of landing."""

    # By partition: how far its leader's clock is ahead of the broker's clock.
    ahead_ms: Mapping[int, int] = field(default_factory=lambda: {0: 0, 1: 0})
    topic: int = 1
    landed: list[Record] = field(default_factory=list)
    note: Note = Note(landed=0, topic=1, ends={})
    logs: dict[int, list[Record]] = field(init=False)

    def __post_init__(self) -> None:
        self.logs = {partition: [] for partition in self.ahead_ms}

    @property
    def topic_id(self) -> str:
        return id_of(self.topic)

    @property
    def ends(self) -> dict[int, int]:
        return {partition: len(log) for partition, log in self.logs.items()}

    def append(self, partition: int, time: int, clock_ms: int) -> None:
        """Append an event of this time now; its broker stamps its arrival."""
        log = self.logs[partition]
        arrival = clock_ms + self.ahead_ms[partition]
        log.append(Record(topic=self.topic, partition=partition, offset=len(log), time=time, arrival=arrival))

    def re_create(self) -> None:
        """Delete the topic and create it again: records that are not landed are lost, and offsets begin at 0."""
        self.topic += 1
        self.logs = {partition: [] for partition in self.logs}

    def land(self, chance: random.Random) -> None:
        """Land some records, more of one partition than of the other. A new topic is landed only after a reset."""
        if self.note.topic != self.topic and chance.random() < 0.5:
            return
        self._land({p: chance.randint(self._landed_of(p), end) for p, end in self.ends.items()})

    def land_all(self) -> None:
        """Land all records."""
        self._land(self.ends)

    def _landed_of(self, partition: int) -> int:
        return self.note.ends.get(partition, 0) if self.note.topic == self.topic else 0

    def _land(self, ends: Mapping[int, int]) -> None:
        for partition, end in ends.items():
            self.landed += self.logs[partition][self._landed_of(partition) : end]
        self.note = Note(landed=len(self.landed), topic=self.topic, ends=dict(ends))


@dataclass(frozen=True)
class AdminModel:
    """`KafkaAdminClient` in memory, with the calls by which the product reads a topic and its offsets."""

    broker: Broker

    def describe_cluster(self) -> dict[str, Any]:
        return {"cluster_id": "c"}

    def describe_topics(self, names: Iterable[str]) -> list[dict[str, Any]]:
        partitions = [{"partition_index": number} for number in self.broker.logs]
        topic = {"error_code": 0, "topic_id": self.broker.topic_id, "partitions": partitions}
        return [{**topic, "name": name} for name in names]

    def list_partition_offsets(self, wanted: Mapping[TopicPartition, OffsetSpec], **_: object) -> dict[Any, Any]:
        offsets = {OffsetSpec.EARLIEST: dict.fromkeys(self.broker.logs, 0), OffsetSpec.LATEST: self.broker.ends}
        return {at: SimpleNamespace(offset=offsets[spec][at.partition]) for at, spec in wanted.items()}


def is_before(record: Record, topic_id: str, ends: Mapping[int, int]) -> bool:
    """Whether a landed record lies before these offsets of a topic. Every record of an earlier topic does."""
    topic = number_of(topic_id)
    return record.topic < topic or (record.topic == topic and record.offset < ends.get(record.partition, 0))


def within(records: Iterable[Record], start_ms: int, end_ms: int) -> list[Record]:
    """The records that happened in [start, end)."""
    return [record for record in records if start_ms <= record.time < end_ms]
