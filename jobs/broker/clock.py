"""The broker's clock. To read it, a record is appended to the topic `CLOCK`, and the broker stamps its arrival.

This clock decides whether a slice is over and how old a row is, because the clock of a job's machine may be wrong.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from kafka import KafkaAdminClient, KafkaProducer
from kafka.errors import KafkaError

from jobs.broker.kafka import ADMIN_TIMEOUT_MS, admin, client_options, hushed, require
from jobs.pipelines.source import CLOCK, CLOCK_TOLERANCE_MS
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings
from jobs.times import iso

# Returns the broker's time in milliseconds since 1970.
Clock = Callable[[], int]

# The timestamp of a record that the broker does not stamp.
_NO_STAMP_MS = 0
_ANSWER_MS = ADMIN_TIMEOUT_MS // 2


@contextmanager
def broker_clock(client: KafkaAdminClient, kafka: KafkaSettings) -> Iterator[Clock]:
    """Yield a clock that can be read any number of times. A read is refused while this machine's own clock is wrong."""
    # Without this check a producer would make the broker create the topic, with other settings.
    require(client, [CLOCK.name])
    producer = KafkaProducer(
        **client_options(kafka),
        acks=1,
        enable_idempotence=False,
        allow_auto_create_topics=False,
        bootstrap_timeout_ms=ADMIN_TIMEOUT_MS,
        max_block_ms=ADMIN_TIMEOUT_MS,
        request_timeout_ms=_ANSWER_MS,
        delivery_timeout_ms=ADMIN_TIMEOUT_MS,
    )
    try:
        yield partial(_now_ms, producer)
    finally:
        producer.close(timeout=ADMIN_TIMEOUT_MS / 1000)


def check_clock(client: KafkaAdminClient, kafka: KafkaSettings) -> None:
    """Refuse a machine with a wrong clock: it would stamp batches, heartbeats and receipts with a wrong time."""
    with broker_clock(client, kafka) as clock:
        clock()


def broker_now_ms(kafka: KafkaSettings) -> int:
    """Read the broker's clock once."""
    with admin(kafka) as client, broker_clock(client, kafka) as clock:
        return clock()


def _now_ms(producer: KafkaProducer) -> int:
    before_ms = time.time() * 1000
    stamp_ms = _stamped_ms(producer)
    if stamp_ms == _NO_STAMP_MS:
        raise Refusal(
            f"topic {CLOCK.name!r} does not have message.timestamp.type=LogAppendTime: run the DAG provision_topics or "
            "`tideline topics apply`"
        )
    check_local(before_ms, stamp_ms, time.time() * 1000)
    return stamp_ms


def _stamped_ms(producer: KafkaProducer) -> int:
    with hushed() as reasons:
        try:
            sent = producer.send(CLOCK.name, b"", partition=0, timestamp_ms=_NO_STAMP_MS)
            # Wait a little longer than the producer tries, so that its own error is raised and nothing is logged later.
            return int(sent.get(timeout=(ADMIN_TIMEOUT_MS + _ANSWER_MS) / 1000).timestamp)
        except KafkaError as error:
            raise Refusal(
                f"the broker's time cannot be read, because no record can be appended to topic {CLOCK.name!r} "
                f"({reasons.first or error}): start the broker, or allow WRITE on the topic"
            ) from error


def check_local(before_ms: float, stamp_ms: int, after_ms: float) -> None:
    """Refuse this machine's clock, read before and after the broker's stamp, if it differs too much from the stamp."""
    if before_ms - CLOCK_TOLERANCE_MS <= stamp_ms <= after_ms + CLOCK_TOLERANCE_MS:
        return
    own = iso(round(before_ms if stamp_ms < before_ms else after_ms))
    raise Refusal(
        f"the clocks differ by more than {CLOCK_TOLERANCE_MS / 1000:g} s: this machine's time is {own}, the broker's "
        f"is {iso(stamp_ms)}; set the clock that is wrong, e.g. by NTP"
    )
