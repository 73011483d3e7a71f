"""The promises of made-up traffic: it is repeatable, has the requested shares, and the shape of real traffic."""

import csv
import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.memory_records import MemoryRecords

from jobs.pipelines import SOURCES
from jobs.pipelines.source import Format, Source
from jobs.refusal import Refusal
from jobs.traffic import generator as traffic
from jobs.traffic.corruption import corrupted, kinds
from jobs.traffic.wire import Record, _Batch

START_MS = 1_763_465_000_000
ALL = pytest.mark.parametrize("source", SOURCES)


def drawn(source: str, count: int, **changes) -> list[Record]:
    return list(traffic.records(source, **{"seed": 7, "count": count, "start_ms": START_MS, **changes}))


def fields_of(source: Source, record: Record) -> dict[str, object]:
    """The fields of a record, read strictly by its definition; raises `ValueError` or a similar error if that fails."""
    text = (record.value or b"").decode()
    if record.value is None:
        raise ValueError("null")
    if source.format is Format.TEXT:
        return {"text": text, "ts": dict(record.headers)[source.event_time_header].decode()}
    if source.format is Format.CSV:
        return dict(zip([field.name for field in source.fields], *csv.reader([text], strict=True), strict=True))
    return json.loads(text, parse_int=str, parse_float=str, parse_constant=lambda name: name)


def is_valid(source: Source, record: Record) -> bool:
    try:
        fields = fields_of(source, record)
        numbers = [field.name for field in source.fields if field.type != "STRING"] or [source.event_time_header]
        key = (record.key or b"").decode() if source.key else "none needed"
        event_time = int(fields[source.event_time_field or source.event_time_header])
        return (
            bool(key)
            and all(isinstance(fields[field.name], str) for field in source.fields)
            and all(abs(Decimal(fields[name])) < 10**13 for name in numbers)
            and abs(event_time - START_MS) < 86_400_000
        )
    except (ValueError, KeyError, TypeError, InvalidOperation, RecursionError, csv.Error):
        return False


def times_of(source: str, stream: list[Record]) -> list[int]:
    definition = SOURCES[source]
    name = definition.event_time_field or definition.event_time_header
    return [int(fields_of(definition, record)[name]) for record in stream]


_DIGEST = f"""
import hashlib
from jobs.traffic import generator as traffic
for source in traffic.SOURCES:
    stream = traffic.records(source, seed=7, count=2000, start_ms={START_MS}, late=.1, duplicate=.1, corrupt=.1)
    print(source, hashlib.sha256(repr(list(stream)).encode()).hexdigest())
"""


def test_the_same_arguments_give_the_same_records_in_every_process():
    ran = [
        subprocess.run(
            [sys.executable, "-c", _DIGEST], env={"PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True
        )
        for salt in ("1", "2")
    ]
    assert ran[0].stdout == ran[1].stdout
    assert [line.split()[0] for line in ran[0].stdout.splitlines()] == list(SOURCES)


@ALL
def test_another_seed_gives_other_records(source):
    assert drawn(source, 50) != drawn(source, 50, seed=8)


@ALL
def test_clean_records_are_valid_and_a_shorter_count_is_a_prefix(source):
    stream = drawn(source, 3_000)
    assert [record for record in stream if not is_valid(SOURCES[source], record)] == []
    assert drawn(source, 100) == stream[:100]


@ALL
def test_without_start_only_the_times_differ(source):
    def timeless(record: Record) -> tuple[object, ...]:
        fields = fields_of(SOURCES[source], record._replace(headers=record.headers or (("ts", b"0"),)))
        return record.key, *(value for name, value in fields.items() if name != "ts")

    now_ms = time.time() * 1000
    live = drawn(source, 500, start_ms=None)
    assert list(map(timeless, live)) == list(map(timeless, drawn(source, 500)))
    with_time = [record for record in live if source != "lines" or record.headers]
    assert all(-500 < ts - now_ms < 10_000 for ts in times_of(source, with_time))


def test_one_live_line_in_ten_has_no_header_unless_it_is_late():
    live = drawn("lines", 5_000, start_ms=None)
    assert 400 < sum(not record.headers for record in live) < 600
    late = drawn("lines", 5_000, start_ms=None, late=1.0)
    assert all(record.headers for record in late)
    assert all(record.headers for record in drawn("lines", 5_000))


@ALL
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**64),
    late=st.floats(0, 1),
    duplicate=st.floats(0, 0.9),
    corrupt=st.floats(0, 1),
    step_ms=st.integers(1, 1000),
)
def test_the_shares_are_kept(source, seed, late, duplicate, corrupt, step_ms):
    count = 2_000
    changes = {"seed": seed, "step_ms": step_ms}
    slack = 5 * (count * 0.25) ** 0.5
    clean = drawn(source, count, **changes)
    changed = Counter(a != b for a, b in zip(clean, drawn(source, count, **changes, late=late), strict=True))
    assert abs(changed[True] - late * count) < slack
    broken = Counter(a != b for a, b in zip(clean, drawn(source, count, **changes, corrupt=corrupt), strict=True))
    assert abs(broken[True] - corrupt * count) < slack
    assert abs(repeats(clean, drawn(source, count, **changes, duplicate=duplicate)) - duplicate * count) < slack


def repeats(clean: list[Record], stream: list[Record]) -> int:
    """The number of records that repeat one of the last 64. All others are the clean ones, in order."""
    fresh = 0
    for record in stream:
        if record == clean[fresh]:
            fresh += 1
        else:
            assert record in clean[max(fresh - 64, 0) : fresh]
    return len(stream) - fresh


@ALL
def test_late_events_are_seconds_to_minutes_behind(source):
    on_time, late = times_of(source, drawn(source, 2_000)), times_of(source, drawn(source, 2_000, late=1.0))
    behind = [a - b for a, b in zip(on_time, late, strict=True)]
    assert 2_000 <= min(behind) < 2_200
    assert 500_000 < max(behind) <= 600_000


@ALL
def test_every_corruption_makes_a_valid_record_invalid(source):
    definition, rng = SOURCES[source], Random(3)
    for kind in kinds(definition):
        for record in drawn(source, 100):
            assert not is_valid(definition, corrupted(definition, record, kind, rng)), (kind, record)


@ALL
def test_every_kind_of_corruption_occurs(source):
    rng = Random(3)
    ways = {
        corrupted(SOURCES[source], record, kind, rng).value
        for kind in kinds(SOURCES[source])
        for record in drawn(source, 50)
    }
    assert len(kinds(SOURCES[source])) >= (7 if source == "lines" else 12)
    assert None in ways
    assert any(b"\xff" in (value or b"") for value in ways)
    broken = [record.value for record in drawn(source, 2_000, corrupt=1.0)]
    assert None in broken
    assert any((value or b"").count(b"[") > 1_000 for value in broken) == (SOURCES[source].format is Format.JSON)


def test_popularity_is_skewed():
    for source in ("numbers", "clicks", "orders", "raw_data"):
        counts = Counter(record.key for record in drawn(source, 20_000)).most_common()
        assert len(counts) == traffic.KEYS
        assert counts[0][1] > 5 * counts[len(counts) // 2][1]
    assert len({record.key for record in drawn("numbers", 5_000, keys=3)}) == 3


def test_numbers_wander_in_steps_with_their_own_decimals():
    series = defaultdict(list)
    for record in drawn("numbers", 20_000):
        series[record.key].append(fields_of(SOURCES["numbers"], record)["value"])
    decimals = {key: {len(value.partition(".")[2]) for value in values} for key, values in series.items()}
    assert all(len(found) == 1 for found in decimals.values())
    assert {found.pop() for found in decimals.values()} == {2, 3, 4, 5, 6}
    for values in series.values():
        step = Decimal(1).scaleb(Decimal(values[0]).as_tuple().exponent)
        assert all(abs(Decimal(b) - Decimal(a)) <= 1000 * step for a, b in pairwise(values))


def test_lines_hold_words_of_many_alphabets():
    words = Counter(word for record in drawn("lines", 5_000) for word in record.value.decode().split())
    assert {"naïve", "Größe", "слово", "水"} <= set(words)
    assert words["the"] > 10 * words["Größe"] > 0
    assert len(words) > 1_500


def test_clicks_come_in_visits():
    stream = [record.key for record in drawn("clicks", 20_000, keys=1_000)]
    nearby = sum(stream[at] in stream[at + 1 : at + 100] for at in range(0, 19_000, 10)) / 1_900
    shuffled = Random(1).sample(stream, len(stream))
    by_chance = sum(shuffled[at] in shuffled[at + 1 : at + 100] for at in range(0, 19_000, 10)) / 1_900
    assert nearby > by_chance + 0.2


def test_payments_pay_orders_of_the_same_seed_later_and_leave_some_unpaid():
    orders = {order["order_id"]: order for order in map(json.loads, (r.value for r in drawn("orders", 5_000)))}
    payments = [json.loads(record.value) for record in drawn("payments", 4_000)]
    assert len({payment["order_id"] for payment in payments}) == len(payments)
    assert all(payment["amount"] == orders[payment["order_id"]]["amount"] for payment in payments)
    assert all(payment["ts"] > orders[payment["order_id"]]["ts"] - 200 for payment in payments)
    early = list(orders)[:4_000]
    unpaid = set(early) - {payment["order_id"] for payment in payments}
    assert 0.12 < len(unpaid) / len(early) < 0.18
    assert not set(orders) & {json.loads(record.value)["order_id"] for record in drawn("orders", 100, seed=8)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"source": "nothing"}, "choose one of numbers"),
        ({"late": 1.5}, "late=1.5"),
        ({"corrupt": -0.1}, "corrupt=-0.1"),
        ({"keys": 0}, "keys=0"),
    ],
)
def test_refuses_what_cannot_be(changes, says):
    wanted = {"source": "numbers", "seed": 1, "count": 1, "start_ms": 0, **changes}
    with pytest.raises(Refusal, match=says):
        traffic.records(wanted.pop("source"), **wanted)


_BYTES = st.one_of(st.none(), st.binary(max_size=200), st.integers(8_000, 20_000).map(bytes))
_RECORDS = st.builds(
    Record, _BYTES, _BYTES, st.lists(st.tuples(st.text(max_size=20), st.binary(max_size=80)), max_size=3).map(tuple)
)


@settings(max_examples=50, deadline=None)
@given(st.lists(_RECORDS, min_size=1, max_size=300))
def test_a_batch_is_what_kafka_python_reads_back(stream):
    batch = _Batch()
    for record in stream:
        batch.append(record)
    builder = batch.records()
    builder.close()
    (read,) = MemoryRecords(bytes(builder.buffer()))
    assert isinstance(read, DefaultRecordBatch)
    assert read.validate_crc()
    found = [(one.offset, Record(one.key, one.value, tuple(one.headers))) for one in read]
    assert found == list(enumerate(stream))
