"""Traffic through a real broker: every record arrives once, in order per key; stopping is clean."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.partitioner import murmur2

from jobs.broker.kafka import client_options, describe
from jobs.pipelines import SOURCES
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings
from jobs.traffic import generator as traffic
from jobs.traffic.wire import Record
from local.platform.broker import Broker
from tests.processes import wait_until

pytestmark = pytest.mark.integration
START_MS = 1_763_465_000_000


@pytest.fixture(scope="module")
def kafka(broker: Broker) -> KafkaSettings:
    return KafkaSettings(bootstrap=broker.bootstrap)


@pytest.fixture
def topic(kafka: KafkaSettings, request: pytest.FixtureRequest) -> Iterator[str]:
    """The source's topic, new for this test."""
    source = SOURCES[request.param].topic
    with KafkaAdminClient(**client_options(kafka)) as admin:
        admin.create_topics(
            {source.name: {"num_partitions": 3, "replication_factor": 1, "configs": dict(source.configs)}},
            wait_for_metadata=True,
        )
        yield source.name
        admin.delete_topics([source.name])
        # The broker answers before it has forgotten it.
        wait_until(lambda: source.name not in admin.list_topics(), "the topic is gone")


def landed(kafka: KafkaSettings, topic: str) -> dict[int, list[Record]]:
    """All records of a topic per partition, read by a plain consumer."""
    latest = describe(kafka, [topic])[topic].latest
    found: dict[int, list[Record]] = defaultdict(list)
    with KafkaConsumer(**client_options(kafka), group_id=None, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(topic, partition) for partition in latest])
        deadline = time.monotonic() + 60
        while sum(map(len, found.values())) < sum(latest.values()):
            assert time.monotonic() < deadline, {partition: len(stream) for partition, stream in found.items()}
            for place, polled in consumer.poll(timeout_ms=500).items():
                found[place.partition] += [Record(one.key, one.value, tuple(one.headers)) for one in polled]
    return found


@pytest.mark.parametrize("topic", ["numbers", "clicks", "raw_data"], indirect=True)
def test_each_record_arrives_once_and_in_order_per_key(kafka: KafkaSettings, topic: str):
    stream = list(
        traffic.records(topic, seed=1, count=30_000, start_ms=START_MS, late=0.01, duplicate=0.01, corrupt=0.01)
    )
    sent = traffic.send(kafka, topic, stream)
    found = landed(kafka, topic)
    assert sent.count == 30_000
    expected = defaultdict(list)
    for record in stream:
        if record.key is not None:
            expected[(murmur2(record.key) & 0x7FFFFFFF) % 3].append(record)
    assert {place: [one for one in part if one.key is not None] for place, part in found.items()} == expected
    assert sum(map(len, found.values())) == 30_000


@pytest.mark.parametrize("topic", ["lines"], indirect=True)
def test_records_without_a_key_are_spread(kafka: KafkaSettings, topic: str):
    stream = list(traffic.records(topic, seed=1, count=60_000, start_ms=START_MS, corrupt=0.01))
    traffic.send(kafka, topic, stream)
    found = landed(kafka, topic)
    assert sorted(map(repr, stream)) == sorted(repr(record) for part in found.values() for record in part)
    assert min(len(found[partition]) for partition in range(3)) > 10_000


@pytest.mark.parametrize("topic", ["numbers"], indirect=True)
def test_a_rate_is_kept_and_stop_ends_it_with_everything_sent(kafka: KafkaSettings, topic: str):
    stop, seen = threading.Event(), []

    def at(sent: int) -> None:
        assert not stop.is_set()
        seen.append(sent)
        # A generator that was held up sends a large block, to be in time again.
        small = sum(after - before <= 100 for before, after in pairwise([0, *seen]))
        if sent >= 1_000 and small > 10:
            stop.set()

    sent = traffic.send(
        kafka, topic, traffic.records(topic, seed=1, count=None, start_ms=None), rate=500, stop=stop, progress=at
    )
    assert sent.count <= 500 * sent.seconds
    assert sent.count == sum(describe(kafka, [topic])[topic].latest.values()) == seen[-1]


@pytest.mark.parametrize("topic", ["numbers"], indirect=True)
def test_the_command_stops_cleanly_on_sigterm(kafka: KafkaSettings, topic: str):
    command = [sys.executable, "-m", "jobs", "generate", topic, "--rate", "500", "--seed", "42"]
    ran = subprocess.Popen(command, env={**os.environ, **kafka.as_env()}, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not sum(describe(kafka, [topic])[topic].latest.values()):
        assert time.monotonic() < deadline
        assert ran.poll() is None
    ran.send_signal(signal.SIGTERM)
    told, _ = ran.communicate(timeout=30)
    count = sum(describe(kafka, [topic])[topic].latest.values())
    assert ran.returncode == 0
    assert told.startswith(f"sent {count:,} records to numbers in ")
    assert told.endswith("seed 42\n")


def test_a_missing_topic_is_refused(kafka: KafkaSettings):
    with pytest.raises(Refusal, match="run `tideline topics apply` first"):
        traffic.send(kafka, "payments", [])


@pytest.mark.parametrize("topic", ["numbers"], indirect=True)
def test_what_the_broker_does_not_take_is_refused(kafka: KafkaSettings, topic: str):
    with pytest.raises(Refusal, match="did not take records of 'numbers'"):
        traffic.send(kafka, topic, [Record(b"key", os.urandom(3_000_000))])
