"""Final rows that are folded into files of many slices: who reads a slice sees no difference."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from jobs.connectors.checksums import checksum
from jobs.connectors.fenced import files_with_sizes, value_of
from jobs.connectors.final import FinalTable, Publication, columns_of
from jobs.connectors.states import Header
from jobs.pipelines.slices import Slice, slice_named, slices_between
from jobs.pipelines.spec import HEADERS_SLICE, HOUR_MS, ROWS_SLICE, Pipeline
from jobs.quality import served
from jobs.query import Lake
from tests.connectors import test_final as finals

SUM = finals.SUM
DAY_MS = 24 * HOUR_MS
T0 = slice_named(SUM, "20261110T100000Z").start_ms
AN_HOUR = slices_between(SUM, T0, T0 + HOUR_MS)
# When an hour is folded, and when its day.
HOURS_LATER = T0 + 3 * HOUR_MS
DAYS_LATER = T0 + (SUM.source.horizon_hours + 24 + 14) * HOUR_MS


def never() -> None:
    """The lease holds."""


def publish(
    lake: Path, slices: Sequence[Slice], version: int = 1, pipeline: Pipeline = SUM, rows: int | None = None
) -> FinalTable:
    """As many rows of each slice as the version says, if it is not said."""
    table = FinalTable.open(lake, pipeline)
    with table.staged() as stage:
        table.publish(
            [staged(stage, slice_, version, pipeline, version if rows is None else rows) for slice_ in slices]
        )
    return table


def staged(stage: Path, slice_: Slice, version: int, pipeline: Pipeline, rows: int) -> Publication:
    """The windows of a slice, as Spark stages them: the version is in each measure, the rows of an input beside."""
    values = rows_of(pipeline, slice_, version, rows)
    header = replace(
        finals.header(slice_, version),
        rows=rows,
        slice_seconds=pipeline.slice_seconds,
        fingerprint=pipeline.fingerprint,
        checksum=checksum(pipeline, values),
    )
    if not rows:
        return Publication(header=header, files=())
    for name, value in {"version": version, "run": f"run-{version}", "fingerprint": "f", "_inputs": 1}.items():
        values = values.append_column(name, pa.array([value] * rows))
    file = stage / f"slice={slice_.name}" / "0.parquet"
    file.parent.mkdir(parents=True)
    pq.write_table(values, file)
    return Publication(header=header, files=(file,))


def rows_of(pipeline: Pipeline, slice_: Slice, version: int, rows: int) -> pa.Table:
    schema = columns_of(pipeline)
    starts = [slice_.start + timedelta(seconds=number) for number in range(rows)]
    made = finals.windows(slice_, 1).to_pylist()[0] | dict.fromkeys(
        [measure.name for measure in pipeline.measures], version
    )
    return pa.Table.from_pylist(
        [made | {"window_start": start, "window_end": start + timedelta(seconds=1)} for start in starts], schema=schema
    )


def folders(table: FinalTable) -> list[str]:
    """The folder of each file with rows; of folded files without the sign of their columns."""
    values = (value_of(file) for file in files_with_sizes(DeltaTable(str(table.path))))
    rows = (value for value in values if not value.startswith(HEADERS_SLICE))
    return sorted(value[:13] if value.startswith(ROWS_SLICE) else value for value in rows)


def content(table: FinalTable, slices: Sequence[Slice]) -> Mapping[str, tuple[pa.Table, Header | None]]:
    headers = table.headers()
    return {slice_.name: (table.rows(slice_.name), headers.get(slice_.name)) for slice_ in slices}


def relation(lake: Path) -> list[dict[str, object]]:
    """What anybody is served who reads the table."""
    return Lake(lake).query("SELECT * FROM rolling_sum ORDER BY ALL").to_pylist()


def reopened(table: FinalTable, pipeline: Pipeline = SUM) -> FinalTable:
    found = FinalTable.read(table.path.parent.parent, pipeline)
    assert found is not None
    return found


def test_the_slices_of_an_hour_are_folded_when_it_has_ended_long_ago(tmp_path: Path) -> None:
    table = publish(tmp_path, AN_HOUR, rows=3)
    before, served_before = content(table, AN_HOUR), relation(tmp_path)
    assert len(folders(table)) == 60
    table.tend(never, HOURS_LATER - 1)
    assert len(folders(table)) == 60
    table.tend(never, HOURS_LATER)
    assert folders(table) == ["rows-20261110"]
    for seen in (table, reopened(table)):
        assert content(seen, AN_HOUR) == before
        assert all(seen.has_columns_of_now(slice_.name) for slice_ in AN_HOUR)
    assert relation(tmp_path) == served_before
    assert len(served_before) == 180
    assert not any(served.is_changed(table, SUM, header) for header in table.headers().values())
    assert list(table.staging.iterdir()) == []


def test_a_turn_without_anything_to_fold_commits_nothing(tmp_path: Path) -> None:
    table = publish(tmp_path, AN_HOUR[:3])
    table.tend(never, HOURS_LATER)
    version = table.version
    for now_ms in (HOURS_LATER, HOURS_LATER + HOUR_MS, DAYS_LATER, DAYS_LATER + 300 * DAY_MS):
        table.tend(never, now_ms)
    assert table.version == version


def test_rows_lie_in_the_folded_file_in_order(tmp_path: Path) -> None:
    table = publish(tmp_path, AN_HOUR, rows=3)
    table.tend(never, HOURS_LATER)
    (file,) = (file for file in files_with_sizes(table._table) if ROWS_SLICE in file)
    rows = pq.ParquetFile(table.path / file).read()
    assert rows.column("window_start").to_pylist() == sorted(rows.column("window_start").to_pylist())
    assert rows.column_names == [*columns_of(SUM).names, "version", "as_of", "run", "fingerprint"]


@pytest.mark.parametrize("rows", [2, 0])
def test_a_slice_of_a_folded_hour_is_published_again(tmp_path: Path, rows: int) -> None:
    table = publish(tmp_path, AN_HOUR, 1)
    table.tend(never, HOURS_LATER)
    before, two = content(table, AN_HOUR), AN_HOUR[7:9]
    table = publish(tmp_path, two, 2, rows=rows)
    assert folders(table) == [*(slice_.name for slice_ in two if rows), "rows-20261110"]
    after = content(table, AN_HOUR)
    for slice_ in AN_HOUR:
        if slice_ in two:
            assert after[slice_.name][0] == rows_of(SUM, slice_, 2, rows)
        else:
            assert after[slice_.name] == before[slice_.name]
    assert len(relation(tmp_path)) == 58 + 2 * rows
    then = FinalTable.read(tmp_path, SUM, table.version - 1)
    assert then is not None
    assert content(then, AN_HOUR) == before


def test_a_folded_file_of_which_nothing_is_left_goes(tmp_path: Path) -> None:
    publish(tmp_path, AN_HOUR[:2], 1).tend(never, HOURS_LATER)
    table = publish(tmp_path, AN_HOUR[:2], 2)
    assert folders(table) == [slice_.name for slice_ in AN_HOUR[:2]]
    assert len(relation(tmp_path)) == 4


def test_a_slice_that_has_no_rows_in_a_folded_file_leaves_it_as_it_is(tmp_path: Path) -> None:
    publish(tmp_path, AN_HOUR[:3:2], 1).tend(never, HOURS_LATER)
    publish(tmp_path, AN_HOUR[1:2], 1, rows=0)
    table = FinalTable.open(tmp_path, SUM)
    folded = [file for file in files_with_sizes(table._table) if ROWS_SLICE in file]
    assert table.rows(AN_HOUR[1].name).num_rows == 0
    assert table.has_columns_of_now(AN_HOUR[1].name)
    table = publish(tmp_path, AN_HOUR[1:2], 2)
    assert [file for file in files_with_sizes(table._table) if ROWS_SLICE in file] == folded
    assert len(relation(tmp_path)) == 4
