"""Real parts for all tests: a broker per test file, a shared Spark session, a lake in a temporary folder."""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kafka import KafkaProducer

from jobs import pipelines
from jobs.broker import kafka, topics
from jobs.settings import KafkaSettings, Settings
from local.platform.broker import Broker
from tests import processes
from tests.judges.oracle import Record

os.environ["SPARK_DRIVER_MEMORY"] = "1g"
# Drivers that tests start live for seconds. So their JVMs compile quickly and do not optimize, as those of small
# recomputes do. The one session of all other tests lives for minutes, and does optimize.
_OF_SHORT_DRIVERS = {"SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1"}
os.environ.update(_OF_SHORT_DRIVERS)
# It logs each connection that is closed, even after the run has ended and its log is closed.
logging.getLogger("py4j").setLevel(logging.WARNING)

Produce = Callable[[str, list[Record]], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that need the one Spark session together, and the quick tests first."""
    last = ("compose", "faults", "integration", "spark")
    items.sort(key=lambda item: [name in item.keywords for name in last])


@pytest.fixture(scope="session")
def spark():
    """One session for every test that kills no process."""
    from jobs import session

    settings = replace(Settings.from_env({}), spark_master="local[2]", shuffle_partitions=2)
    with pytest.MonkeyPatch.context() as patch:
        for name in _OF_SHORT_DRIVERS:
            patch.delenv(name)
        spark = session.build(settings, "tests")
    yield spark
    spark.stop()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker for the tests of one file."""
    with Broker(home=tmp_path_factory.mktemp("broker")) as started:
        yield started


@pytest.fixture
def settings(broker: Broker, tmp_path: Path) -> Settings:
    """A new lake on that broker; its topics are new and empty."""
    kafka_settings = KafkaSettings(bootstrap=broker.bootstrap)
    renew_topics(kafka_settings)
    return replace(
        Settings.from_env({}),
        kafka=kafka_settings,
        lake_root=tmp_path / "lake",
        spark_master="local[2]",
        shuffle_partitions=2,
    )


def renew_topics(kafka_settings: KafkaSettings) -> None:
    """Delete and create every topic of the definitions."""
    with kafka.admin(kafka_settings) as client:
        there = [name for name in client.list_topics() if not name.startswith("__")]
        if there:
            client.delete_topics(there)
            # The broker answers before the deleted topics are gone from its list.
            processes.wait_until(lambda: not set(there) & set(client.list_topics()), "topics deleted")
        topics.apply(client, topics.survey(client, pipelines.topics()))


def grow_topic(kafka_settings: KafkaSettings, name: str, partitions: int) -> None:
    """Add partitions to a topic, and wait until the broker lists them."""
    with kafka.admin(kafka_settings) as client:
        client.create_partitions({name: partitions})
        processes.wait_until(
            lambda: kafka.require(client, [name])[name].partitions == partitions, f"{name} has {partitions} partitions"
        )


@pytest.fixture
def produce(broker: Broker) -> Produce:
    """A function that sends records exactly as given."""

    def send(topic: str, records: list[Record]) -> None:
        producer = KafkaProducer(bootstrap_servers=broker.bootstrap, max_request_size=2 * 1024 * 1024)
        try:
            for record in records:
                partition = record.partition if record.partition >= 0 else None
                producer.send(topic, record.value, key=record.key, headers=list(record.headers), partition=partition)
            producer.flush()
        finally:
            producer.close()

    return send
