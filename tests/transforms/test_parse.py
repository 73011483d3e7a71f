"""Which records are accepted or rejected, and why: by hand for each kind, and against a naive parser."""

import json
import time
from dataclasses import replace
from datetime import UTC

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from jobs.pipelines import SOURCES
from jobs.transforms.parse import accepted, parse
from tests import dirty
from tests.judges import oracle
from tests.judges.oracle import Record
from tests.transforms.kafka_frame import frame

pytestmark = pytest.mark.spark

NOW = int(time.time() * 1000)


def parsed(spark: SparkSession, source: str, *values: bytes | None, key: bytes | None = b"k") -> list[dict]:
    records = [Record(arrival_ms=NOW, key=key, value=value) for value in values]
    return [row.asDict() for row in parse(frame(spark, records), SOURCES[source]).collect()]


NUMBERS = [
    ('{"id":1,"ts":%d,"value":1e300000000}', "does not fit: exponent"),
    ('{"id":1,"ts":%d,"value":"1e300000000"}', "does not fit: exponent"),
    ('{"id":1,"ts":%d,"value":2.5},1]', "malformed JSON"),
    ('{"id":1,"ts":%d,"value":2.5},1],{', "malformed JSON"),
    ('{"id":1,"ts":%d,"value":1,"value":"2.5"}', "malformed JSON"),
    ('{"id":1,"ts":%d,"value":1,"value":1.12345678}', "malformed JSON"),
    ('{"id":1,"ts":%d,"value":1,"value":2}', "malformed JSON"),
    ('{"id":1,"ts":%d,"value":1,"ts":1.5}', "malformed JSON"),
    ('{"id":1,"ts":%d,"value":1,"more":{"a":1,"a":2}}', "malformed JSON"),
    ('{"id":1,"ts":%d,"x\\"value":1,"value":"2.5"}', "wrong type: value"),
    ('{"id":1,"ts":%d,"x\\"value":1,"value":1.12345678}', "does not fit: value"),
    ('{"id":1,"ts":%d,"\\u0076alue":2.5}', None),
    ('{"id":1,"ts":%d,"value":1,"\\u0076alue":"2.5"}', "malformed JSON"),
    ('{"id":1,"ts":%d,"\\"value":1,"\\u0076alue":"2.5"}', "wrong type: value"),
    ('{"id":1,"ts":%d,"value":1,"note":"a\\/b \\"value\\": x"}', None),
    ('{"id":1,"ts":%d,"value":1,garbage}', "malformed JSON"),
    ('{"id":1,"ts":%d,"value":1,}', "malformed JSON"),
    ('{"id":1,"ts":%d,"\\u0076alue":1e-30}', "does not fit: value"),
    ('{"id":1,"ts":%d,"val\\u0075e":1.00000000000000000000000000001}', "does not fit: value"),
    ('{"id":1,"ts":%d,"value":1.5}', None),
    (' { "value" : 1.5 , "ts" : %d , "id" : 1 } ', None),
    ('{"id":1,"ts":%d,"value":1.5,"more":{"value":"2"}}', None),
    ('{"id":1,"ts":%d,"value":-1e-6}', None),
    ('{"id":1,"ts":%d,"value":0.0000010}', None),
    ('{"id":1,"ts":%d,"value":1e12}', "does not fit: value"),
    ('{"id":1,"ts":%d,"value":1.00000000000000000000000000000001}', "does not fit: value"),
    ('{"id":1,"ts":%d,"value":1e-40}', "does not fit: value"),
    ('{"id":1,"ts":%d,"value":"1.5"}', "wrong type: value"),
    ('{"id":1,"ts":%d,"value":true}', "wrong type: value"),
    ('{"id":1,"ts":%d,"value":null}', "missing: value"),
    ('{"id":1,"ts":%d}', "missing: value"),
    ('{"id":1.0,"ts":%d,"value":1}', "wrong type: id"),
    ('{"id":9223372036854775808,"ts":%d,"value":1}', "does not fit: id"),
    ('{"id":1,"ts":%d.5,"value":1}', "wrong type: ts"),
    ('{"id":1,"ts":-%d,"value":1}', "event time too old"),
    ('{"id":1,"ts":9%d,"value":1}', "event time too far ahead"),
    ('{"id":1,"ts":%d,"value":1', "malformed JSON"),
    ('{"id":1,"ts":%d,"value":1}}', "malformed JSON"),
    ('{"id":1,"ts":%d,"value":1},{"id":1}', "malformed JSON"),
    ('{"id":1,"ts":%d,"value":1},1', "malformed JSON"),
    ('{"id":1,"ts":%d,"value":1}]', "malformed JSON"),
    ('[{"id":1,"ts":%d,"value":1}]', "malformed JSON"),
    ('"id %d"', "malformed JSON"),
    ("{'id':1,'ts':%d,'value':1}", "malformed JSON"),
    ('{"id":1,"ts":%d,"value":123456789012.1234567}', "does not fit: value"),
    ('{"id":1,"ts":%d,"value":1234567890123.456789e-1}', "does not fit: value"),
    ('{"id":1,"ts":%d,"value":1.234567890123456E11}', None),
    ('{"id":1,"ts":%d,"value":1e400}', "does not fit: value"),
]


def test_numbers(spark: SparkSession) -> None:
    values = [(text % NOW).encode() for text, _ in NUMBERS]
    rows = parsed(spark, "numbers", *values)
    assert [(text, row["reason"]) for (text, _), row in zip(NUMBERS, rows, strict=True)] == NUMBERS
    for value, row in zip(values, rows, strict=True):
        accepted = row["reason"] is None
        assert (row["raw"], row["raw_key"]) == ((None, None) if accepted else (value, b"k"))
        assert (row["event_time"] is not None) == accepted


def test_bytes_that_are_no_text_and_keys(spark: SparkSession) -> None:
    good = b'{"id":1,"ts":%d,"value":1}' % NOW
    assert [row["reason"] for row in parsed(spark, "numbers", None, b"\xff", b"", good)] == [
        "null value",
        "invalid UTF-8",
        "malformed JSON",
        None,
    ]
    assert parsed(spark, "numbers", good, key=None)[0]["reason"] == "no key"
    assert parsed(spark, "numbers", good, key=b"\xff")[0]["reason"] == "invalid UTF-8: key"
    assert parsed(spark, "clicks", b'{"user":"u","ts":%d,"page":"p"}' % NOW, key=None)[0]["reason"] is None


LINES = [
    ('%d,"pump ""A"", hall",m,1.5', None),
    ('%d,"C:\\",m,1.5', None),
    ("%d" + "," * 25_000, "malformed CSV"),
    ("%d,d,m,0." + "0" * 100_000 + "1", "does not fit: value"),
    ("%d,d,m,1.5", None),
    ('%d,"d, ""quoted""",m,-2\r\n', None),
    ("%d,d,m", "malformed CSV"),
    ("%d,d,m,1,2", "malformed CSV"),
    ("%d,d,m,1\n%d,d,m,2", "malformed CSV"),
    ('%d,d,m,"1,000"', "wrong type: value"),
    ("%d,d,m,NaN", "wrong type: value"),
    ("%d,d,m,1e400", "does not fit: value"),
    ("%d,d,m,0.1234567", "does not fit: value"),
    ("%d,,m,1", "missing: device"),
    ("%d.0,d,m,1", "wrong type: ts"),
    ("", "missing: ts"),
]


def test_raw_data(spark: SparkSession) -> None:
    rows = parsed(spark, "raw_data", *(line.replace("%d", str(NOW)).encode() for line, _ in LINES))
    assert [(line, row["reason"]) for (line, _), row in zip(LINES, rows, strict=True)] == LINES
    assert [row["device"] for row in rows[:2]] == ['pump "A", hall', "C:\\"]


def test_lines_take_their_time_from_the_header_else_from_the_arrival(spark: SparkSession) -> None:
    stamps = [None, str(NOW - 5000).encode(), b"soon", b"1e3", str(NOW - 10**10).encode()]
    records = [Record(arrival_ms=NOW, value=b"hello", headers=(("ts", s),) if s else ()) for s in stamps]
    records.append(Record(arrival_ms=NOW, value=b"hello", headers=(("other", b"1"),)))
    rows = parse(frame(spark, records), SOURCES["lines"]).collect()
    wrong = "wrong type: header ts"
    assert [row.reason for row in rows] == [None, None, wrong, wrong, "event time too old", None]
    ages = [(row.arrival_time - row.event_time).total_seconds() for row in rows if row.event_time]
    assert ages == [0, 5, 0]


def test_lines_without_a_header_for_it_happen_when_they_arrive(spark: SparkSession) -> None:
    source = replace(SOURCES["lines"], event_time_header=None)
    (row,) = parse(frame(spark, [Record(arrival_ms=NOW, value=b"hello", headers=(("None", b"1"),))]), source).collect()
    assert (row.reason, row.event_time) == (None, row.arrival_time)


def test_live_jobs_see_what_ingest_accepts(spark: SparkSession) -> None:
    values = [(text % NOW).encode() for text, _ in NUMBERS]
    records = frame(spark, [Record(arrival_ms=NOW, key=b"k", value=value) for value in (*values, None, b"\xff")])
    landed = parse(records, SOURCES["numbers"]).where("reason IS NULL").drop("reason", "raw", "raw_key", "raw_headers")
    assert accepted(records, SOURCES["numbers"]).collect() == landed.collect()
    assert landed.count() == sum(reason is None for _, reason in NUMBERS)


def test_strings_must_be_strings(spark: SparkSession) -> None:
    texts = [
        '{"user":5,"ts":%d,"page":"p"}',
        '{"user":["u"],"ts":%d,"page":"p"}',
        '{"user":"u{","ts":%d,"page":"\\"p"}',
        '{"user":"u","user":5,"ts":%d,"page":"p"}',
    ]
    rows = parsed(spark, "clicks", *((text % NOW).encode() for text in texts))
    assert [row["reason"] for row in rows] == ["wrong type: user", "wrong type: user", None, "malformed JSON"]


def judge(spark: SparkSession, source: str, records: list[Record]) -> None:
    rows = parse(frame(spark, records), SOURCES[source]).collect()
    for record, row in zip(records, rows, strict=True):
        event = oracle.accept(source, record)
        assert (row.reason is None) == (event is not None), (record, row)
        if event:
            assert {name: row[name] for name in event.columns} == event.columns, (record, row)
            assert row.event_time.replace(tzinfo=UTC).timestamp() * 1000 == pytest.approx(event.event_ms, abs=0.01)


def test_every_kind_of_dirt_is_judged_as_the_oracle_does(spark: SparkSession) -> None:
    judge(spark, "numbers", dirty.records(NOW, each=8, seed=7))


_numbers = st.one_of(
    st.integers(),
    st.decimals(allow_nan=False, allow_infinity=False, places=6).map(float),
    st.floats(),
    st.text(),
    st.none(),
    st.booleans(),
)
_stamps = st.one_of(st.integers(NOW - 10**6, NOW + 10**5), st.integers(), st.floats(), st.text(max_size=3))
_documents = st.fixed_dictionaries(
    {}, optional={"id": st.one_of(st.integers(), _numbers), "ts": _stamps, "value": _numbers, "more": _numbers}
).map(lambda document: json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass"))
_near_misses = st.builds(
    lambda text, cut, junk: text[: len(text) - cut] + junk, _documents, st.integers(0, 3), st.binary(max_size=3)
)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(_documents, _near_misses), min_size=60, max_size=60))
def test_numbers_like_the_naive_parser(spark: SparkSession, values: list[bytes]) -> None:
    judge(spark, "numbers", [Record(arrival_ms=NOW, value=value) for value in values])


_MEMBER_VALUES = (
    *("1", "-0", "1.5", "1.1234567", "123456789012.5", "1234567890123", "1e3", "1E-3", "007", ".5", "1.", "+1", "true"),
    *('"2.5"', '"value"', '"a\\"value\\":3"', '"\\u00e9\\/"', '"{"', "null", '{"value":2}', '["value",1]', "NaN", ""),
)
_ODD_NAMES = ('"\\u0076alue"', '"x\\"value"', '"value\\""', '"\\"value"', '"Value"', '"more"', "'value'", "value", '""')


@st.composite
def _texts(draw: st.DrawFn, right: dict[str, str]) -> bytes:
    """An object as a person may write it by hand: mostly right, with a name repeated, escaped or missing."""
    members = [(f'"{name}"', value) for name, value in right.items() if draw(st.integers(0, 19))]
    names = st.sampled_from([f'"{name}"' for name in right] + list(_ODD_NAMES))
    extra = st.tuples(names, st.sampled_from((*_MEMBER_VALUES, *right.values())))
    members += draw(st.lists(extra, max_size=2))
    space = st.sampled_from(["", "", " ", "\n"])
    written = [
        draw(space) + name + draw(space) + ":" + value + draw(space) for name, value in draw(st.permutations(members))
    ]
    end = draw(st.sampled_from(["}"] * 8 + ["} ", "}}", "", "},1", "},{}", "}x", ",}"]))
    return ("{" + ",".join(written) + end).encode()


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_texts({"id": "7", "ts": str(NOW), "value": "1.5"}), min_size=60, max_size=60))
def test_numbers_in_every_handwriting(spark: SparkSession, values: list[bytes]) -> None:
    judge(spark, "numbers", [Record(arrival_ms=NOW, value=value) for value in values])


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        _texts({"order_id": '"o"', "customer": '"value"', "ts": str(NOW), "amount": "12.5"}), min_size=60, max_size=60
    )
)
def test_orders_in_every_handwriting(spark: SparkSession, values: list[bytes]) -> None:
    judge(spark, "orders", [Record(arrival_ms=NOW, key=None, value=value) for value in values])
