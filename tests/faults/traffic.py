"""Traffic that goes on while processes are killed and disks fill."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from kafka import KafkaProducer

from jobs.broker import kafka
from jobs.settings import Settings
from tests import processes
from tests.judges.oracle import Record


@contextmanager
def steady(settings: Settings, numbers: Callable[[], Iterable[Record]], **options: Any) -> Iterator[None]:
    """Send more numbers five times a second while the block runs. The producer takes the options."""
    producer = KafkaProducer(**kafka.client_options(settings.kafka), **options)

    def send() -> None:
        for record in numbers():
            producer.send("numbers", record.value, key=record.key)
        producer.flush()

    with closing(producer), processes.repeated(send, 0.2):
        yield
