"""Statistics of files: readers pass over files by them, so a wrong one loses rows."""

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.lake import stream_tables as tables
from jobs.lake.delta.manifest import Manifest
from jobs.lake.delta.reading import files_of
from jobs.lake.stream_tables import TableWriter
from tests.lake.test_stream_tables import commit, note, opened

# -- Statistics: readers pass over files by them, so a wrong one loses rows --

WIDE = pa.schema(
    [
        ("number", pa.int64()),
        ("text", pa.string()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("amount", pa.decimal128(18, 6)),
        ("raw", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("slice", pa.string()),
    ]
)
TEXTS = ["", "a", "b", "reason", "x" * 32, "x" * 33, "x" * 40, "ä", "\U0001f30a", "z" * 100]
TIMES = [datetime(1969, 12, 31, 23, 59, 59, 999999, UTC), datetime(2026, 11, 18, tzinfo=UTC)]
ROW = st.fixed_dictionaries(
    {
        "number": st.none() | st.sampled_from([-(2**63), -5, -1, 0, 1, 2**53 + 1, 2**63 - 1]),
        "text": st.none() | st.sampled_from(TEXTS),
        "at": st.none() | st.sampled_from([time + timedelta(microseconds=n) for time in TIMES for n in (0, 1, 999)]),
        "amount": st.none() | st.sampled_from([Decimal(n) for n in ("-0.000001", "0", "0.1", "999999999999.999999")]),
        "raw": st.none() | st.sampled_from([b"", b"\xff", b"text"]),
        "headers": st.none() | st.just([]) | st.just([{"key": "k", "value": None}]),
    }
)


def write_rows(path: Path, files: list[list[dict[str, Any]]]) -> None:
    writer = TableWriter.open(path, WIDE, "slice", epoch=1)
    columns = WIDE.remove(WIDE.get_field_index("slice"))
    for batch, file_rows in enumerate(files):
        folder = writer.new_stage()
        file = folder / "slice=a" / "part.parquet"
        file.parent.mkdir(parents=True)
        # Two rows a group: bounds and nulls must be combined over the groups of a file.
        pq.write_table(pa.Table.from_pylist(file_rows, schema=columns), file, row_group_size=2)
        writer.commit(Manifest.of(folder), note(batch))


def conditions(row: dict[str, Any]) -> Iterator[tuple[str, pc.Expression, Any]]:
    """Questions about a row's values, each as an Arrow expression and as a plain function."""
    for name in ("number", "text", "at", "amount", "raw"):
        field, value = pc.field(name), row[name]
        yield name, field.is_null(), lambda v: v is None
        yield name, field.is_valid(), lambda v: v is not None
        if value is not None:
            scalar = pa.scalar(value, WIDE.field(name).type)
            yield name, field == scalar, lambda v, value=value: v == value
            if name != "raw":
                yield name, field < scalar, lambda v, value=value: v is not None and v < value
                yield name, field >= scalar, lambda v, value=value: v is not None and v >= value


@settings(max_examples=25, deadline=None)
@given(
    files=st.lists(st.lists(ROW, min_size=1, max_size=5), min_size=1, max_size=3),
    asked=ROW,
)
def test_statistics_lose_no_row(
    files: list[list[dict[str, Any]]], asked: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("statistics")
    write_rows(path, files)
    dataset = files_of(DeltaTable(path), path)
    everything = [row for rows_of_file in files for row in rows_of_file]
    with duckdb.connect() as database:
        database.execute("SET TimeZone = 'UTC'")
        database.register("lake", dataset)
        for name, expression, holds in conditions(asked):
            wanted = sum(holds(row[name]) for row in everything)
            assert dataset.count_rows(filter=expression) == wanted, str(expression)
        for name in ("number", "text", "at", "amount", "raw", "headers"):
            nulls = sum(row[name] is None for row in everything)
            for condition, wanted in (("IS NULL", nulls), ("IS NOT NULL", len(everything) - nulls)):
                found = database.execute(f'SELECT count(*) FROM lake WHERE "{name}" {condition}').fetchone()
                assert found == (wanted,), f"{name} {condition}"
            if name != "headers" and asked[name] is not None:
                for sign, holds in (("=", lambda v, a: v == a), ("<=", lambda v, a: v <= a), (">", lambda v, a: v > a)):
                    wanted = sum(row[name] is not None and holds(row[name], asked[name]) for row in everything)
                    query = f'SELECT count(*) FROM lake WHERE "{name}" {sign} ?'
                    value = [asked[name]]
                    assert database.execute(query, value).fetchone() == (wanted,), f"{name} {sign} {asked[name]!r}"
    shutil.rmtree(path)


def test_statistics_say_what_is_known_and_nothing_else(path: Path) -> None:
    low, high = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    write_rows(
        path,
        [
            [
                {"number": 3, "text": "b", "at": high, "amount": Decimal(1), "raw": b"x", "headers": []},
                {"number": None, "text": "x" * 33, "at": None, "amount": None, "raw": None, "headers": None},
                {"number": -1, "text": None, "at": low, "amount": None, "raw": None, "headers": None},
            ]
        ],
    )
    (entry,) = [json.loads(line) for line in (path / "_delta_log" / f"{1:020}.json").read_text().splitlines()][1:2]
    stats = json.loads(entry["add"]["stats"])
    assert stats == {
        "numRecords": 3,
        "minValues": {"number": -1, "text": "b", "at": "2026-01-01T00:00:00.000000Z"},
        "maxValues": {"number": 3, "at": "2026-01-02T00:00:00.000000Z"},
        "nullCount": {"number": 1, "text": 1, "at": 1, "amount": 2, "raw": 2},
    }


def test_statistics_survive_a_merge(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 9)
    writer = opened(path)
    for batch in range(9):
        commit(writer, batch)
    writer.maintain()
    assert len(DeltaTable(path).file_uris()) == 1
    dataset = files_of(DeltaTable(path), path)
    assert dataset.count_rows(filter=pc.field("text").is_null()) == 3
    assert dataset.count_rows(filter=pc.field("text").is_valid()) == 6
    assert dataset.count_rows(filter=pc.field("number") >= 7) == 2
