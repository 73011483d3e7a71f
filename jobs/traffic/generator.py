"""Made-up traffic that looks real: skewed and wandering, with some records late, repeated or broken."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, count, islice
from random import Random

from jobs.broker.kafka import describe
from jobs.pipelines import SOURCES
from jobs.pipelines.source import Source
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings
from jobs.traffic.corruption import corrupted, kinds
from jobs.traffic.wire import BulkProducer, Record

KEYS = 100
_DELAY_MS = 200
_LATE_MS = (2_000, 600_000)
_REPEATED_WITHIN = 64
_WITHOUT_HEADER = 0.1
_BLOCK = 10_000
_TICK_SECONDS = 0.05

# Returns the event time of the nth event, in milliseconds.
EventTime = Callable[[int], int]
# Returns endless records of one source, from a random generator, a number of keys and the event times.
Shape = Callable[[Random, int, EventTime], Iterator[Record]]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The result of `send`."""

    count: int
    seconds: float


def records(
    source: str,
    *,
    seed: int,
    count: int | None,
    start_ms: int | None,
    step_ms: int = 1,
    late: float = 0.0,
    duplicate: float = 0.0,
    corrupt: float = 0.0,
    keys: int = KEYS,
) -> Iterator[Record]:
    """Records, byte for byte the same for the same arguments: one per ``step_ms`` of event time from ``start_ms`` on.

    An event is up to 200 ms older than that. Without ``start_ms`` an event happens when it is drawn, by the clock. Then
    one in ten records of `lines` has no header with its event time, unless that time is late or broken. All else stays
    the same. Without ``count`` there is no end.

    Three arguments are shares of all records. A ``late`` record is older by 2 seconds to 10 minutes. A ``duplicate``
    repeats one of the last 64. A ``corrupt`` record cannot be parsed (one of `jobs.traffic.corruption.kinds`).
    ``keys`` is the number of series, users, customers or devices.

    >>> next(records("clicks", seed=7, count=1, start_ms=1_800_000_000_000)).value
    b'{"user": "user-0000", "ts": 1799999999995, "page": "/search"}'
    """
    definition = _source(source)
    _check(keys, late=late, duplicate=duplicate, corrupt=corrupt)

    # Each kind of fault has its own random generator, so that faults do not change the records between them.
    def chance(of: str) -> Random:
        return Random(f"{seed}/{source}/{of}")

    stream = _SHAPES[source](
        Random(f"{seed}/{_SEEDED_AS.get(source, source)}"), keys, _event_time(start_ms, step_ms, late, chance("late"))
    )
    if duplicate:
        stream = _repeated(stream, duplicate, chance("duplicate"))
    if corrupt:
        stream = _corrupted(definition, stream, corrupt, chance("corrupt"))
    if start_ms is None and definition.event_time_header:
        stream = _some_without_header(stream, chance("header"))
    return islice(stream, count)


def send(
    kafka: KafkaSettings,
    source: str,
    stream: Iterable[Record],
    *,
    rate: float = 0.0,
    stop: threading.Event | None = None,
    progress: Callable[[int], object] = lambda sent: None,
) -> Sent:
    """Send records to the source's topic, ``rate`` per second (0: as fast as possible), to their end or until ``stop``.

    Records with a key keep their order. ``progress`` is called now and then with the number of records sent.
    """
    topic = _source(source).topic.name
    state = describe(kafka, [topic]).get(topic)
    if state is None:
        raise Refusal(f"topic {topic!r} does not exist at {kafka.bootstrap}: run `tideline topics apply` first")
    with BulkProducer(kafka, topic, state.partitions) as producer:
        return _pace(producer, iter(stream), rate, stop or threading.Event(), progress)


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise Refusal(f"there is no source {name!r}: choose one of {', '.join(SOURCES)}")
    return SOURCES[name]


def _pace(
    producer: BulkProducer,
    stream: Iterator[Record],
    rate: float,
    stop: threading.Event,
    progress: Callable[[int], object],
) -> Sent:
    began, sent = time.monotonic(), 0
    while not stop.is_set():
        due = min(int((time.monotonic() - began) * rate) - sent, _BLOCK) if rate else _BLOCK
        if due < 1:
            stop.wait(_TICK_SECONDS)
            continue
        block = producer.send(islice(stream, due))
        sent += block
        progress(sent)
        if block < due:
            break
    producer.flush()
    return Sent(count=sent, seconds=time.monotonic() - began)


def _check(keys: int, **shares: float) -> None:
    if keys < 1:
        raise Refusal(f"keys={keys}: at least one key is needed")
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise Refusal(f"{name}={share} is no share: give a number from 0 to 1, e.g. 0.01")


def _event_time(start_ms: int | None, step_ms: int, late: float, rng: Random) -> EventTime:
    """Event times a moment before arrival; those of late events are seconds to minutes before it.

    >>> happened = _event_time(1_000_000, 1_000, late=0.0, rng=Random(7))
    >>> [happened(index) for index in range(3)]
    [999998, 1001000, 1002000]
    """
    soonest, latest = _LATE_MS

    def happened(index: int) -> int:
        arrival_ms = time.time_ns() // 1_000_000 if start_ms is None else start_ms + index * step_ms
        # All three are drawn for each event, so that another share of late events does not change other delays.
        delay, is_late, lateness = rng.random(), rng.random() < late, rng.random()
        late_ms = int(soonest * (latest / soonest) ** lateness) if is_late else 0
        return arrival_ms - int(delay**4 * _DELAY_MS) - late_ms

    return happened


def _repeated(stream: Iterator[Record], share: float, rng: Random) -> Iterator[Record]:
    recent: deque[Record] = deque(maxlen=_REPEATED_WITHIN)
    while True:
        if recent and rng.random() < share:
            yield rng.choice(recent)
            continue
        record = next(stream)
        recent.append(record)
        yield record


def _corrupted(source: Source, stream: Iterator[Record], share: float, rng: Random) -> Iterator[Record]:
    ways = kinds(source)
    for record in stream:
        yield corrupted(source, record, rng.choice(ways), rng) if rng.random() < share else record


def _some_without_header(stream: Iterator[Record], rng: Random) -> Iterator[Record]:
    """Remove the header of some lines. Then the arrival is the event time, so late or broken lines keep theirs."""
    for record in stream:
        drop = rng.random() < _WITHOUT_HEADER
        yield record._replace(headers=()) if drop and _just_now(record) else record


def _just_now(record: Record) -> bool:
    stamp = record.headers[0][1]
    return stamp.isdigit() and 0 <= time.time() * 1000 - int(stamp) < 2 * _DELAY_MS


def _popular(rng: Random, number: int) -> Iterator[int]:
    """Indices by Zipf's law: the nth is drawn 1/n as often as the first."""
    weights = list(accumulate(1 / rank for rank in range(1, number + 1)))
    while True:
        yield from rng.choices(range(number), cum_weights=weights, k=1024)


def _numbers(rng: Random, keys: int, event_time: EventTime) -> Iterator[Record]:
    """Series that wander: each in steps of its own size, with 2 to 6 decimals."""
    names = [f"series-{number:04d}".encode() for number in range(keys)]
    decimals = [rng.randint(2, 6) for _ in names]
    units = [rng.randrange(-100_000, 1_000_000) for _ in names]
    for index, series in enumerate(_popular(rng, keys)):
        units[series] += int(rng.random() * 2001) - 1000
        value = f"{units[series] / 10 ** decimals[series]:.{decimals[series]}f}"
        yield Record(names[series], f'{{"id": {index}, "ts": {event_time(index)}, "value": {value}}}'.encode())


_COMMON_WORDS = (
    *("the", "of", "and", "to", "in", "is", "on", "that", "it", "for", "was", "with", "as", "at", "by", "from"),
    *("tide", "sea", "water", "moon", "shore", "wave", "sand", "wind", "boat", "light", "don't", "e-mail", "42"),
    *("naïve", "café", "Größe", "Straße", "слово", "море", "вода", "été", "garçon", "señal", "łódź", "水", "θάλασσα"),
)
_SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu", "na", "pe", "ri", "so", "tu", "va", "we")
_VOCABULARY = 2_000


def _lines(rng: Random, keys: int, event_time: EventTime) -> Iterator[Record]:
    """Sentences of words by Zipf's law, some with capitals and commas."""
    words = [
        *_COMMON_WORDS,
        *("".join(rng.choices(_SYLLABLES, k=rng.randint(2, 4))) for _ in range(_VOCABULARY - len(_COMMON_WORDS))),
    ]
    popular = _popular(rng, len(words))
    for index in count():
        text = " ".join([words[place] for place in islice(popular, rng.randint(3, 12))])
        if index % 3 == 0:
            text = text.capitalize().replace(" ", ", ", 1) + "."
        yield Record(None, text.encode(), (("ts", b"%d" % event_time(index)),))


_PAGES = ("/", "/search", "/product", "/product/reviews", "/cart", "/checkout", "/help", "/über-uns")
_VISITORS_AT_ONCE = 20
_CLICKS_PER_VISIT = 8


def _clicks(rng: Random, keys: int, event_time: EventTime) -> Iterator[Record]:
    """Visits: a few users click for a while and leave, then others come."""
    users, pages = _popular(rng, keys), _popular(rng, len(_PAGES))
    here = [next(users) for _ in range(_VISITORS_AT_ONCE)]
    for index in count():
        visitor = int(rng.random() * _VISITORS_AT_ONCE)
        user = f"user-{here[visitor]:04d}"
        if rng.random() < 1 / _CLICKS_PER_VISIT:
            here[visitor] = next(users)
        value = f'{{"user": "{user}", "ts": {event_time(index)}, "page": "{_PAGES[next(pages)]}"}}'
        yield Record(user.encode(), value.encode())


_UNPAID = 0.15
_PAID_AFTER_ORDERS = 100


@dataclass(frozen=True, kw_only=True)
class _Order:
    order_id: str
    customer: str
    cents: int
    # How many other orders come before its payment; None means that it is never paid.
    paid_after: int | None


def _all_orders(rng: Random, keys: int) -> Iterator[_Order]:
    # The prefix makes orders of two seeds different orders.
    prefix = f"{rng.getrandbits(32):08x}"
    for index, customer in enumerate(_popular(rng, keys)):
        cents = int(100 * 500 ** rng.random())
        unpaid, patience = rng.random() < _UNPAID, rng.random()
        yield _Order(
            order_id=f"{prefix}-{index:08d}",
            customer=f"customer-{customer:04d}",
            cents=cents,
            paid_after=None if unpaid else int(_PAID_AFTER_ORDERS**patience),
        )


def _orders(rng: Random, keys: int, event_time: EventTime) -> Iterator[Record]:
    """Many small orders, few large ones."""
    for index, order in enumerate(_all_orders(rng, keys)):
        value = (
            f'{{"order_id": "{order.order_id}", "customer": "{order.customer}", "ts": {event_time(index)}, '
            f'"amount": {order.cents / 100:.2f}}}'
        )
        yield Record(order.customer.encode(), value.encode())


def _payments(rng: Random, keys: int, event_time: EventTime) -> Iterator[Record]:
    """The payments of the orders of the same seed, each up to 100 orders later; 15 in 100 orders are never paid."""
    due: list[tuple[int, str, int]] = []
    for index, order in enumerate(_all_orders(rng, keys)):
        if order.paid_after is not None:
            heappush(due, (index + order.paid_after, order.order_id, order.cents))
        # No payment of a later order can come before these.
        while due and due[0][0] <= index + 1:
            at, order_id, cents = heappop(due)
            value = (
                f'{{"payment_id": "payment-{order_id}", "order_id": "{order_id}", "ts": {event_time(at)}, '
                f'"amount": {cents / 100:.2f}}}'
            )
            yield Record(order_id.encode(), value.encode())


_METRICS = (("temperature", 2), ("humidity", 1), ("pressure", 3), ("vibration", 4))


def _raw_data(rng: Random, keys: int, event_time: EventTime) -> Iterator[Record]:
    """Readings of devices; some names hold a comma, as in real CSV."""
    names = [f"pump-{number:03d}" if number % 10 else f'"pump, hall {number}"' for number in range(keys)]
    units = [[rng.randrange(1_000, 100_000) for _ in _METRICS] for _ in names]
    for index, device in enumerate(_popular(rng, keys)):
        which = int(rng.random() * len(_METRICS))
        metric, decimals = _METRICS[which]
        units[device][which] += int(rng.random() * 21) - 10
        value = f"{units[device][which] / 10**decimals:.{decimals}f}"
        name = names[device]
        yield Record(name.strip('"').encode(), f"{event_time(index)},{name},{metric},{value}".encode())


# Payments have the seed of orders, so that they pay the same orders.
_SEEDED_AS = {"payments": "orders"}
_SHAPES: dict[str, Shape] = {
    "numbers": _numbers,
    "lines": _lines,
    "clicks": _clicks,
    "orders": _orders,
    "payments": _payments,
    "raw_data": _raw_data,
}
