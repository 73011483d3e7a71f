"""SQL over hand-written tables: the newest row of each window, exact values, and nothing but reading."""

import csv
import io
import json
import math
import shutil
import threading
import time
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.lake.delta.manifest import Manifest
from jobs.lake.stream_tables import Note, Ranges, TableWriter
from jobs.query.answers import as_text, visible, visible_lines, write_csv, write_json
from jobs.query.lake import Lake
from jobs.refusal import Refusal
from jobs.settings import QueryLimits

TIME = pa.timestamp("us", tz="UTC")
LIVE = pa.schema(
    [
        ("window_start", TIME),
        ("window_end", TIME),
        ("word", pa.string()),
        ("occurrences", pa.int64()),
        ("slice", pa.string()),
        ("epoch", pa.int64()),
        ("batch", pa.int64()),
        ("as_of", TIME),
        ("fingerprint", pa.string()),
        ("offsets", pa.string()),
        ("watermark", TIME),
    ]
)
EVENTS = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("arrival_time", TIME),
        ("event_time", TIME),
        ("key", pa.string()),
        ("id", pa.int64()),
        ("value", pa.decimal128(18, 6)),
        ("reason", pa.string()),
        ("raw", pa.binary()),
        ("raw_key", pa.binary()),
        ("raw_headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("hour", pa.string()),
    ]
)


def at(minute: int, second: int = 0) -> datetime:
    return datetime(2026, 11, 18, 12, minute, second, tzinfo=UTC)


class Table:
    """A table of the lake, written as its job writes it."""

    def __init__(self, path: Path, schema: pa.Schema, partition: str) -> None:
        self.writer = TableWriter.open(path, schema, partition, epoch=1)
        self.schema, self.partition, self.batch = schema, partition, 0

    def append(self, *rows: dict[str, Any]) -> None:
        folder = self.writer.new_stage()
        for number, row in enumerate(rows):
            row = dict(row)
            file = folder / f"{self.partition}={row.pop(self.partition)}" / f"{number}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            # As Spark writes it: with only the columns of the row.
            pq.write_table(pa.Table.from_pylist([row], pa.schema([self.schema.field(name) for name in row])), file)
        topics = {"lines": Ranges(topic_id="t1", offsets={})}
        note = Note(job="j", write_id="w1", batch=self.batch, epoch=1, cluster_id="c1", topics=topics)
        self.writer.commit(Manifest.of(folder), note)
        self.batch += 1


def window(minute: int, word: str | None, occurrences: int, *, epoch: int = 1, batch: int) -> dict[str, Any]:
    return {
        "window_start": at(minute),
        "window_end": at(minute + 1),
        "word": word,
        "occurrences": occurrences,
        "slice": f"20261118T12{minute:02}00Z",
        "epoch": epoch,
        "batch": batch,
        "as_of": at(minute, batch),
        "fingerprint": "def34c9782c3",
    }


def batch_row(batch: int, *, epoch: int = 1) -> dict[str, Any]:
    return {
        "slice": "batches",
        "epoch": epoch,
        "batch": batch,
        "as_of": at(0, batch),
        "offsets": '{"0":[0,5]}',
        "watermark": at(0),
    }


@pytest.fixture
def words(tmp_path: Path) -> Table:
    table = Table(tmp_path / "live" / "word_count", LIVE, "slice")
    table.append(window(0, "tide", 1, batch=0), window(0, "sea", 5, batch=0), batch_row(0))
    table.append(window(0, "tide", 3, batch=1), window(1, "tide", 10, batch=1), batch_row(1))
    # A successor: a higher epoch wins over a higher number of a batch.
    table.append(window(0, "sea", 7, epoch=2, batch=2), batch_row(2, epoch=2))
    table.append(window(0, "sea", 6, epoch=1, batch=9))
    return table


@pytest.fixture
def numbers(tmp_path: Path) -> Table:
    table = Table(tmp_path / "events" / "numbers", EVENTS, "hour")
    record = {"topic": "numbers", "partition": 0, "arrival_time": at(0), "hour": "2026-11-18T12"}
    good = {"event_time": at(0), "key": "a", "id": 1, "reason": None}
    table.append(
        {**record, **good, "offset": 0, "value": Decimal("1.100000")},
        {**record, **good, "offset": 1, "value": Decimal("-0.000001")},
        {**record, "offset": 2, "value": None, "reason": "malformed JSON", "raw": b'{"\xff', "raw_key": b"a"},
    )
    table.append({**record, **good, "offset": 3, "value": Decimal("999999999999.999999")})
    return table


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def rows(lake: Lake, sql: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in lake.query(sql).to_pylist()]


def test_the_newest_row_of_each_window_and_key_counts(words: Table, lake: Lake) -> None:
    found = rows(lake, "SELECT window_start, word, occurrences, as_of FROM word_count ORDER BY 1, 2")
    assert found == [(at(0), "sea", 7, at(0, 2)), (at(0), "tide", 3, at(0, 1)), (at(1), "tide", 10, at(1, 1))]


def test_a_window_is_shown_with_its_finality(words: Table, lake: Lake) -> None:
    answer = lake.query("FROM word_count LIMIT 1")
    names = ["window_start", "window_end", "word", "occurrences", "finality", "version", "as_of"]
    assert answer.column_names == names
    assert rows(lake, "SELECT DISTINCT finality, version FROM word_count") == [("live", 0)]


def test_rows_about_batches_are_no_windows(words: Table, lake: Lake) -> None:
    assert rows(lake, "SELECT count(*) FROM word_count WHERE word IS NULL OR window_start IS NULL") == [(0,)]
    assert rows(lake, "SELECT count(*) FROM lake_live_word_count WHERE slice = 'batches'") == [(3,)]


def test_a_null_key_is_a_key(words: Table, lake: Lake) -> None:
    words.append(window(0, None, 1, batch=3))
    words.append(window(0, None, 2, batch=4))
    assert rows(lake, "SELECT occurrences FROM word_count WHERE word IS NULL") == [(2,)]


def test_the_running_total_is_a_view_over_the_newest_rows(words: Table, lake: Lake) -> None:
    assert rows(lake, "SELECT word, occurrences FROM word_count_total ORDER BY 1") == [("sea", 7), ("tide", 13)]


def test_a_warm_lake_sees_the_next_commit(words: Table, lake: Lake) -> None:
    question = "SELECT occurrences FROM word_count WHERE word = 'tide' AND window_start = '2026-11-18 12:01:00Z'"
    assert rows(lake, question) == [(10,)]
    words.append(window(1, "tide", 11, batch=10))
    assert rows(lake, question) == [(11,)]


def test_a_warm_lake_outlives_merges_and_a_new_table(
    words: Table, lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.lake.stream_tables.COMPACT_EVERY_COMMITS", 1)
    before = rows(lake, "FROM word_count ORDER BY ALL")
    words.writer.maintain()
    assert rows(lake, "FROM word_count ORDER BY ALL") == before
    shutil.rmtree(tmp_path / "live" / "word_count")
    again = Table(tmp_path / "live" / "word_count", LIVE, "slice")
    again.append(window(3, "new", 1, batch=0))
    assert rows(lake, "SELECT word FROM word_count") == [("new",)]


def test_accepted_and_rejected_are_two_halves(numbers: Table, lake: Lake) -> None:
    assert rows(lake, 'SELECT "offset" FROM events_numbers ORDER BY 1') == [(0,), (1,), (3,)]
    found = rows(lake, 'SELECT "offset", reason, raw, raw_key FROM quarantine_numbers')
    assert found == [(2, "malformed JSON", b'{"\xff', b"a")]


@pytest.mark.parametrize(
    ("condition", "offsets"),
    [
        ("value > 0", [0, 3]),
        ("value = -0.000001", [1]),
        ("value < 0", [1]),
        ("value IS NULL", [2]),
        ("value IS NOT NULL", [0, 1, 3]),
        ("raw IS NOT NULL", [2]),
        ("raw_headers IS NULL", [0, 1, 2, 3]),
        ("raw_headers IS NOT NULL", []),
        ("reason IS NULL AND value >= 999999999999.999999", [3]),
        ("key = 'a'", [0, 1, 3]),
        ("key IS NULL", [2]),
        ("hour = '2026-11-18T12' AND id = 1", [0, 1, 3]),
        ("hour > '2026-11-18T12'", []),
    ],
)
def test_a_condition_loses_no_row(numbers: Table, lake: Lake, condition: str, offsets: list[int]) -> None:
    """Also on columns without statistics in a file, and on columns that a file does not have."""
    found = rows(lake, f'SELECT "offset" FROM lake_events_numbers WHERE {condition} ORDER BY 1')
    assert found == [(offset,) for offset in offsets]
    assert rows(lake, f"SELECT count(*) FROM lake_events_numbers WHERE {condition}") == [(len(offsets),)]


def test_names_are_read_in_any_case(words: Table, lake: Lake) -> None:
    assert rows(lake, "SELECT COUNT(*) FROM Word_Count") == rows(lake, "select count(*) from word_count")


def test_a_table_that_is_not_there_yet_is_explained(lake: Lake) -> None:
    with pytest.raises(
        Refusal, match=r"^live/word_count does not exist yet, because the job that writes it has never run"
    ):
        lake.query("SELECT * FROM word_count_total")
    with pytest.raises(Refusal, match=r"the query cannot be answered: .*no_such_thing"):
        lake.query("SELECT * FROM no_such_thing")


def test_a_stream_that_was_reset_before_its_first_row_has_none(lake: Lake, tmp_path: Path) -> None:
    """A reset makes the table; the first micro-batch adds its columns."""
    TableWriter.open(tmp_path / "live" / "word_count", None, "slice", epoch=1)
    assert rows(lake, "SELECT word, finality FROM word_count WHERE window_start > now()") == []


def test_a_table_that_comes_later_is_found(lake: Lake, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="does not exist yet"):
        lake.query("FROM word_count")
    table = Table(tmp_path / "live" / "word_count", LIVE, "slice")
    assert rows(lake, "FROM word_count") == [], "created, and nothing written yet"
    table.append(window(0, "tide", 1, batch=0))
    assert rows(lake, "SELECT word FROM word_count") == [("tide",)]


@pytest.mark.parametrize(
    "sql",
    [
        "",
        ";",
        "SELECT 1; SELECT 2",
        "CREATE TABLE x (a INT)",
        "INSERT INTO lake_live_word_count SELECT * FROM lake_live_word_count",
        "DROP VIEW word_count",
        "COPY (SELECT 1) TO '{file}'",
        "COPY x FROM '{file}'",
        "EXPORT DATABASE '{file}'",
        "ATTACH '{file}'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "PRAGMA version",
        "SET enable_external_access = true",
        "SET threads = 1",
        "CALL pragma_version()",
        "EXPLAIN ANALYZE SELECT 1",
    ],
)
def test_only_one_select_is_answered(words: Table, lake: Lake, sql: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="write one SELECT: a query can only read the lake"):
        lake.query(sql.format(file=tmp_path / "written"))
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize(
    "source",
    [
        "read_csv('{file}')",
        "read_text('{file}')",
        "read_blob('{file}')",
        "read_json('{file}')",
        "read_parquet('{file}')",
        "parquet_metadata('{file}')",
        "sniff_csv('{file}')",
        "glob('/etc/*')",
        "'{file}'",
        "duckdb_secrets()",
        "query('SELECT * FROM read_text(''{file}'')')",
    ],
)
def test_no_file_is_read(lake: Lake, source: str, tmp_path: Path) -> None:
    file = tmp_path / "secret.csv"
    file.write_text("a\nsecret\n")
    with pytest.raises(Refusal) as refused:
        lake.query("SELECT * FROM " + source.format(file=file))
    assert "the query cannot be answered" in str(refused.value)


def test_a_python_variable_is_no_table(lake: Lake) -> None:
    frame = pa.table({"a": [1]})
    with pytest.raises(Refusal, match="frame"):
        lake.query("SELECT * FROM frame")
    assert frame.num_rows == 1


# -- Limits of a query --


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(*) FROM range(1000000000000)",
        "SELECT count(*) FROM range(10000000) AS a, range(10000000) AS b WHERE a.range * b.range % 7 = 3",
        "SELECT hash(range) AS h FROM range(1000000000000) ORDER BY h LIMIT 10",
        "WITH RECURSIVE t AS (SELECT 1 AS a UNION ALL SELECT a + 1 FROM t) SELECT count(*) FROM t",
        "SELECT count(*) FROM range(1000000000000) WHERE regexp_matches(repeat('a', 3000) || range, '(a|aa)+(b|c)*x')",
        "SELECT * FROM range(1000000000000) WHERE range < 3000 OR range < 0",
        "SELECT sleep_ms(600000)",
    ],
)
def test_a_query_that_never_returns_is_stopped(tmp_path: Path, sql: str) -> None:
    began, before = time.monotonic(), threading.active_count()
    lake, stopped = (
        Lake(tmp_path, QueryLimits(seconds=1)),
        r"stopped after 1 s: .* more with --seconds or QUERY_SECONDS",
    )
    with pytest.raises(Refusal, match=stopped), lake.ask(sql) as answer:
        list(answer.batches)
    assert time.monotonic() - began < 30
    assert threading.active_count() == before


def test_our_own_queries_may_take_longer_than_a_persons(tmp_path: Path) -> None:
    """A check reads more rows every month, and must not fail because of that."""
    assert Lake(tmp_path, QueryLimits(seconds=1)).query("SELECT sleep_ms(1500)").num_rows == 1


def test_time_between_two_batches_is_not_the_querys(tmp_path: Path) -> None:
    """A pager waits for its reader, and that time must not count."""
    with Lake(tmp_path, QueryLimits(seconds=1)).ask("SELECT * FROM range(50000)") as answer:
        rows, began = next(answer.batches).num_rows, time.monotonic()
        while time.monotonic() < began + 1.2:
            time.sleep(0.1)
        assert rows + sum(batch.num_rows for batch in answer.batches) == 50_000


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT hash(range) AS h FROM range(100000000) ORDER BY h",
        "SELECT list(range) FROM range(1000000000)",
        "SELECT range % 1000000007 AS g, count(*) FROM range(10000000000) GROUP BY g",
        "SELECT repeat('x', 1000000 + range::INT) FROM range(100000)",
    ],
)
def test_memory_is_limited_and_no_file_written(tmp_path: Path, sql: str) -> None:
    with pytest.raises(Refusal, match=r"needs more than 100 MB of memory: .*, or allow more with QUERY_MEMORY_MB$"):
        Lake(tmp_path, QueryLimits(memory_mb=100)).query(sql)
    assert not list(tmp_path.iterdir())


def test_rows_are_limited_for_users_and_not_for_our_own_queries(tmp_path: Path) -> None:
    lake, sql = Lake(tmp_path, QueryLimits(rows=5000)), "SELECT * FROM range(7000)"
    assert lake.query(sql).num_rows == 7000
    batches: list[pa.RecordBatch] = []
    with lake.ask(sql) as answer, pytest.raises(Refusal, match="more than 5,000 rows"):
        batches.extend(answer.batches)
    assert pa.Table.from_batches(batches).column("range").to_pylist() == list(range(5000))


def test_limits_are_those_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUERY_MEMORY_MB", "50")
    with pytest.raises(Refusal, match="more than 50 MB"):
        Lake(tmp_path).query("SELECT list(range) FROM range(1000000000)")


def test_control_characters_are_spelled_out() -> None:
    assert visible("a\tb\x00\x7f\x9b\u2066\ufeff\U000e0041") == r"a\tb\x00\x7f\x9b\u2066\ufeff\U000e0041"
    assert visible_lines("a\n\rb\x1b") == "a\n\\rb\\x1b"
    plain = "Straße, 海, नमस्ते, 👩‍🚀, \\x1b"
    assert visible(plain) == plain


# -- How answers are written --


def as_json(answer: pa.Table) -> str:
    out = io.StringIO()
    write_json(answer.column_names, answer.to_batches(), out)
    return out.getvalue()


def as_csv(answer: pa.Table) -> str:
    out = io.StringIO()
    write_csv(answer.column_names, answer.to_batches(), out)
    return out.getvalue()


VALUES = """SELECT
  1.10::DECIMAL(18,6) AS exact, 0::DECIMAL(38,20) AS nothing, 123456789012345678901234.5::DECIMAL(38,1) AS large,
  9223372036854775807 AS whole, 0.1::DOUBLE AS inexact, 'NaN'::DOUBLE AS nan, 'Infinity'::DOUBLE AS infinite,
  true AS yes, NULL AS none, 'ä "x", \U0001f30a' AS text, '\\x00\\xFFa\\x5C'::BLOB AS bytes,
  TIMESTAMPTZ '2026-11-18 13:00:00.5+01' AS millis, TIMESTAMPTZ '2026-11-18 12:00:00.000001Z' AS micros,
  TIMESTAMP '2026-11-18 12:00:00' AS plain, DATE '2026-11-18' AS day, TIME '12:00:00' AS hour,
  [1.5::DECIMAL(3,1), NULL] AS many, {'a': 1.50::DECIMAL(5,2), 'b': 'x'} AS one"""


def test_json_is_exact(lake: Lake) -> None:
    (row,) = json.loads(as_json(lake.query(VALUES)), parse_float=str)
    assert row == {
        "exact": "1.100000",
        "nothing": "0.00000000000000000000",
        "large": "123456789012345678901234.5",
        "whole": 9223372036854775807,
        "inexact": "0.1",
        "nan": None,
        "infinite": None,
        "yes": True,
        "none": None,
        "text": 'ä "x", \U0001f30a',
        "bytes": "\\x00\\xFFa\\x5C",
        "millis": "2026-11-18T12:00:00.500Z",
        "micros": "2026-11-18T12:00:00.000001Z",
        "plain": "2026-11-18T12:00:00.000",
        "day": "2026-11-18",
        "hour": "12:00:00",
        "many": ["1.5", None],
        "one": {"a": "1.50", "b": "x"},
    }


def test_csv_and_text_say_the_same(lake: Lake) -> None:
    answer = lake.query(VALUES)
    header, row = list(csv.reader(io.StringIO(as_csv(answer))))
    assert header == answer.column_names
    assert [row] == [list(each) for each in as_text(answer)]
    shown = dict(zip(header, row, strict=True))
    assert (shown["exact"], shown["none"], shown["text"]) == ("1.100000", "", 'ä "x", \U0001f30a')
    assert (shown["millis"], shown["bytes"]) == ("2026-11-18T12:00:00.500Z", "\\x00\\xFFa\\x5C")
    assert (shown["many"], shown["one"]) == ("[1.5, null]", '{"a": 1.50, "b": "x"}')
    assert math.isnan(float(shown["nan"]))


def test_spans_and_maps_are_written_too(lake: Lake) -> None:
    answer = lake.query("SELECT INTERVAL 1500 MILLISECONDS AS span, MAP {'a': 1.50} AS map, true AS yes")
    assert as_csv(answer) == 'span,map,yes\nP0M0DT1.5S,"{""a"": 1.50}",true\n'
    assert json.loads(as_json(answer)) == [{"span": "P0M0DT1.5S", "map": {"a": 1.5}, "yes": True}]


def test_a_time_beyond_the_calendar_is_refused(lake: Lake) -> None:
    with pytest.raises(Refusal, match="the answer holds a time outside the years 1 to 9999: cast it to VARCHAR"):
        as_json(lake.query("SELECT 'infinity'::TIMESTAMPTZ"))


def test_an_empty_answer_has_its_columns(lake: Lake) -> None:
    nothing = lake.query("SELECT 1 AS a, 'x' AS b WHERE false")
    assert (as_json(nothing), as_csv(nothing), as_text(nothing)) == ("[]\n", "a,b\n", [])


def test_columns_of_one_name_are_told_apart(lake: Lake) -> None:
    answer = lake.query("SELECT 1 AS a, 2 AS a, 3 AS a_1, 4 AS a")
    assert as_csv(answer).splitlines()[1] == "1,2,3,4"
    assert list(json.loads(as_json(answer))[0].values()) == [1, 2, 3, 4]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder, so that no file of the project has a name that a query could mean."""
    monkeypatch.chdir(tmp_path)
