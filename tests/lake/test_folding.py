"""Final rows are folded into files of many slices, and a reader of one slice sees no difference."""

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.finality import checking, rollback
from jobs.lake import final as final_module
from jobs.lake import folding
from jobs.lake.columns import checksum, columns_of
from jobs.lake.delta.fenced import FencedTable, OvertakenError
from jobs.lake.delta.reading import files_with_sizes, value_of
from jobs.lake.final import FinalTable
from jobs.lake.folding import Stored, due, stored
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.publication import Publication
from jobs.lake.slices import Header
from jobs.pipelines.layout import HEADERS_SLICE, HOUR_MS, ROWS_SLICE
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import Slice, slice_at, slice_named, slices_between
from jobs.pipelines.window import Measure
from jobs.query.lake import Lake
from jobs.refusal import Refusal
from tests.lake import test_final as finals

SUM = finals.SUM
# The same pipeline with one more measure.
MORE = replace(SUM, measures=(*SUM.measures, Measure(name="highest", sql="max(value)", type="DECIMAL(18,6)")))
DAY_MS = 24 * HOUR_MS
T0 = slice_named(SUM, "20261110T100000Z").start_ms
AN_HOUR = slices_between(SUM, T0, T0 + HOUR_MS)
# The times at which an hour is folded, and its day.
HOURS_LATER = T0 + 3 * HOUR_MS
DAYS_LATER = T0 + (SUM.source.horizon_hours + 24 + 14) * HOUR_MS


def never() -> None:
    """Stand in for a lease check that always succeeds."""


def publish(
    lake: Path, slices: Sequence[Slice], version: int = 1, pipeline: Pipeline = SUM, rows: int | None = None
) -> FinalTable:
    """Publish slices. Without ``rows``, each slice has as many rows as its version number."""
    table = FinalTable.open(lake, pipeline)
    with table.staged() as stage:
        table.publish(
            [staged(stage, slice_, version, pipeline, version if rows is None else rows) for slice_ in slices]
        )
    return table


def staged(stage: Path, slice_: Slice, version: int, pipeline: Pipeline, rows: int) -> Publication:
    """The windows of a slice, as Spark stages them: each measure is the version; the columns of the stage are added."""
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
    """The folder of each file with rows; for folded files without the digest of their columns."""
    values = (value_of(file) for file in files_with_sizes(DeltaTable(str(table.path))))
    rows = (value for value in values if not value.startswith(HEADERS_SLICE))
    return sorted(value[:13] if value.startswith(ROWS_SLICE) else value for value in rows)


def content(table: FinalTable, slices: Sequence[Slice]) -> Mapping[str, tuple[pa.Table, Header | None]]:
    headers = table.headers()
    return {slice_.name: (table.rows(slice_.name), headers.get(slice_.name)) for slice_ in slices}


def relation(lake: Path) -> list[dict[str, object]]:
    """The rows that every reader of the table is served."""
    return Lake(lake).query("SELECT * FROM rolling_sum ORDER BY ALL").to_pylist()


def reopened(table: FinalTable) -> FinalTable:
    found = FinalTable.read(table.path.parent.parent, SUM)
    assert found is not None
    return found


def test_the_slices_of_an_hour_are_folded_when_it_has_ended_long_ago(tmp_path: Path) -> None:
    table = publish(tmp_path, AN_HOUR, rows=3)
    before, served_before = content(table, AN_HOUR), relation(tmp_path)
    assert len(folders(table)) == 60
    table.maintain(never, HOURS_LATER - 1)
    assert len(folders(table)) == 60
    table.maintain(never, HOURS_LATER)
    assert folders(table) == ["rows-20261110"]
    for seen in (table, reopened(table)):
        assert content(seen, AN_HOUR) == before
        assert all(seen.has_columns_of_now(slice_.name) for slice_ in AN_HOUR)
    assert relation(tmp_path) == served_before
    assert len(served_before) == 180
    assert not any(checking.is_changed(table, SUM, header) for header in table.headers().values())
    assert list(table.staging.iterdir()) == []


def test_a_turn_without_anything_to_fold_commits_nothing(tmp_path: Path) -> None:
    table = publish(tmp_path, AN_HOUR[:3])
    table.maintain(never, HOURS_LATER)
    version = table.version
    for now_ms in (HOURS_LATER, HOURS_LATER + HOUR_MS, DAYS_LATER, DAYS_LATER + 300 * DAY_MS):
        table.maintain(never, now_ms)
    assert table.version == version


def test_rows_lie_in_the_folded_file_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in groups, so that a reader of one slice passes over most of them."""
    monkeypatch.setattr(folding, "_GROUP_ROWS", 20)
    table = publish(tmp_path, AN_HOUR, rows=3)
    table.maintain(never, HOURS_LATER)
    (file,) = (file for file in files_with_sizes(table._table) if ROWS_SLICE in file)
    assert pq.read_metadata(table.path / file).num_row_groups == 9
    rows = pq.ParquetFile(table.path / file).read()
    assert rows.column("window_start").to_pylist() == sorted(rows.column("window_start").to_pylist())
    assert rows.column_names == [*columns_of(SUM).names, "version", "as_of", "run", "fingerprint"]


@pytest.mark.parametrize("rows", [2, 0])
def test_a_slice_of_a_folded_hour_is_published_again(tmp_path: Path, rows: int) -> None:
    table = publish(tmp_path, AN_HOUR, 1)
    table.maintain(never, HOURS_LATER)
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
    publish(tmp_path, AN_HOUR[:2], 1).maintain(never, HOURS_LATER)
    table = publish(tmp_path, AN_HOUR[:2], 2)
    assert folders(table) == [slice_.name for slice_ in AN_HOUR[:2]]
    assert len(relation(tmp_path)) == 4


def test_a_slice_that_has_no_rows_in_a_folded_file_leaves_it_as_it_is(tmp_path: Path) -> None:
    publish(tmp_path, AN_HOUR[:3:2], 1).maintain(never, HOURS_LATER)
    publish(tmp_path, AN_HOUR[1:2], 1, rows=0)
    table = FinalTable.open(tmp_path, SUM)
    folded = [file for file in files_with_sizes(table._table) if ROWS_SLICE in file]
    assert table.rows(AN_HOUR[1].name).num_rows == 0
    assert table.has_columns_of_now(AN_HOUR[1].name)
    table = publish(tmp_path, AN_HOUR[1:2], 2)
    assert [file for file in files_with_sizes(table._table) if ROWS_SLICE in file] == folded
    assert len(relation(tmp_path)) == 4


# -- Days --


def spread(hours: int, each: int = 1) -> list[Slice]:
    """The first ``each`` slices of every hour, for so many hours."""
    return [slice_at(SUM, T0 + hour * HOUR_MS + minute * 60_000) for hour in range(hours) for minute in range(each)]


def test_a_day_is_folded_when_no_late_event_can_reopen_its_slices(tmp_path: Path) -> None:
    slices = spread(5, 2)
    table = publish(tmp_path, slices, rows=2)
    before, served_before = content(table, slices), relation(tmp_path)
    # The last hour ended less than two hours ago, though its slices ended earlier.
    table.maintain(never, T0 + 7 * HOUR_MS - 1)
    assert folders(table) == [slices[-2].name, slices[-1].name, *["rows-20261110"] * 4]
    table.maintain(never, DAYS_LATER - 1)
    assert folders(table) == ["rows-20261110"] * 5
    table.maintain(never, DAYS_LATER)
    assert folders(table) == ["rows-20261110"]
    assert content(reopened(table), slices) == before
    assert relation(tmp_path) == served_before


def test_the_slices_of_an_old_day_are_folded_at_once(tmp_path: Path) -> None:
    slices = spread(20)
    table = publish(tmp_path, slices)
    version, before = table.version, content(table, slices)
    table.maintain(never, DAYS_LATER + DAY_MS)
    assert folders(table) == ["rows-20261110", "rows-20261111"]
    assert table.version == version + 2
    assert content(table, slices) == before


def test_slices_of_a_folded_day_that_are_published_again_are_folded_again(tmp_path: Path) -> None:
    slices = spread(14)
    publish(tmp_path, slices, rows=5).maintain(never, DAYS_LATER)
    for number, slice_ in enumerate(slices):
        table = publish(tmp_path, [slice_], 2, rows=number)
        table.maintain(never, DAYS_LATER)
        # The large file takes in small ones only when there are enough of them.
        assert len(folders(table)) <= 4
    assert [table.rows(slice_.name).num_rows for slice_ in slices] == list(range(14))
    assert len(relation(tmp_path)) == sum(range(14))
    assert set(folders(table)) == {"rows-20261110"}


@pytest.mark.parametrize("seconds", [3600, 86_400, 7 * 86_400])
def test_slices_as_long_as_an_hour_or_a_day_are_folded_if_there_are_several(tmp_path: Path, seconds: int) -> None:
    pipeline = replace(SUM, slice_seconds=seconds)
    slices = [slice_at(pipeline, T0 + number * seconds * 1000) for number in range(3)]
    table = publish(tmp_path, slices, pipeline=pipeline, rows=3)
    before = [table.rows(slice_.name) for slice_ in slices]
    for now_ms in (slices[-1].end_ms + 3 * HOUR_MS, slices[-1].end_ms + 400 * DAY_MS):
        table.maintain(never, now_ms)
        assert [table.rows(slice_.name) for slice_ in slices] == before
    # A slice of a day has a file of its own in any case.
    assert folders(table) == (["rows-20261110"] if seconds == 3600 else [slice_.name for slice_ in slices])


# -- Rolling back --


def test_what_was_published_before_a_fold_can_be_rolled_back_to(tmp_path: Path) -> None:
    publish(tmp_path, AN_HOUR[:4], 1)
    table = publish(tmp_path, AN_HOUR[:2], 2)
    table.maintain(never, HOURS_LATER)
    table = publish(tmp_path, AN_HOUR[:1], 3)
    table.maintain(never, DAYS_LATER)
    table = publish(tmp_path, AN_HOUR[:1], 4)
    for version in (1, 2, 3, 4):
        header, rows = rollback.earlier(PipelineLake(tmp_path, SUM), table, AN_HOUR[0].name, version)
        assert (header.version, rows) == (version, rows_of(SUM, AN_HOUR[0], version, version))
    header, rows = rollback.earlier(PipelineLake(tmp_path, SUM), table, AN_HOUR[1].name, 1)
    assert rows == rows_of(SUM, AN_HOUR[1], 1, 1)
    with pytest.raises(Refusal, match="version 5 of slice"):
        rollback.earlier(PipelineLake(tmp_path, SUM), table, AN_HOUR[0].name, 5)


def test_a_version_that_was_folded_long_ago_is_read_as_it_was_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that is seldom written keeps its log for longer than the files that a fold has replaced."""
    monkeypatch.setattr(
        final_module, "_retention", lambda: {"delta.deletedFileRetentionDuration": "interval 0 seconds"}
    )
    publish(tmp_path, AN_HOUR[:2], 1).maintain(never, HOURS_LATER)
    table = FinalTable.open(tmp_path, SUM)
    table.delete_what_no_reader_needs()
    assert not (table.path / f"slice={AN_HOUR[0].name}").exists()
    table = publish(tmp_path, AN_HOUR[:1], 2)
    assert rollback.earlier(PipelineLake(tmp_path, SUM), table, AN_HOUR[0].name, 1)[1] == rows_of(SUM, AN_HOUR[0], 1, 1)


# -- Two definitions --


def test_rows_of_two_definitions_are_not_mixed_in_a_file(tmp_path: Path) -> None:
    """In one file, the older rows would seem to have the newer definition's columns, and to have lost their values."""
    publish(tmp_path, AN_HOUR[:4], 1)
    table = publish(tmp_path, AN_HOUR[1:3], 2, MORE)
    before = content(table, AN_HOUR[:4])
    for now_ms in (HOURS_LATER, DAYS_LATER):
        table.maintain(never, now_ms)
        assert folders(table) == ["rows-20261110"] * 2
        version = table.version
        table.maintain(never, now_ms)
        assert table.version == version
        assert content(table, AN_HOUR[:4]) == before
        assert [table.has_columns_of_now(slice_.name) for slice_ in AN_HOUR[:4]] == [False, True, True, False]
        assert not any(checking.is_changed(table, MORE, header) for header in table.headers().values())
        assert [reopened(table).has_columns_of_now(slice_.name) for slice_ in AN_HOUR[:4]] == [True, False, False, True]
    schemas = [pq.read_schema(table.path / file.path).names for file in stored(table._table)]
    assert sorted("highest" in names for names in schemas) == [False, True]


def test_folded_files_with_other_columns_are_not_written_again_and_again() -> None:
    start = T0 * 1000
    alike = [Stored(f"slice=rows-20261110-a/{number}", 10, 1, start + number, start + number) for number in range(2)]
    assert [each.files for each in due(alike, SUM, DAYS_LATER)] == [tuple(alike)]
    assert list(due([alike[0], alike[1]._replace(path="slice=rows-20261110-b/1")], SUM, DAYS_LATER)) == []
    # A large file takes in small ones only when there are more of them.
    assert list(due([alike[0], alike[1]._replace(size=20)], SUM, DAYS_LATER)) == []
    large = [
        file._replace(path=f"slice=rows-20261110-a/{number}", size=50_000_000)
        for number in range(5)
        for file in alike[:1]
    ]
    assert [len(each.files) for each in due(large, SUM, DAYS_LATER)] == [2, 2]


# -- Rows that are not folded --


@pytest.mark.parametrize("start", [AN_HOUR[2].start, None])
def test_a_slice_with_a_window_that_begins_elsewhere_stays_as_it_is(tmp_path: Path, start: datetime | None) -> None:
    """A person may have approved such a slice."""
    publish(tmp_path, AN_HOUR[:3])
    table = FinalTable.open(tmp_path, SUM)
    with table.staged() as stage:
        stray = staged(stage, AN_HOUR[1], 2, SUM, 2)
        values = rows_of(SUM, AN_HOUR[1], 2, 2).to_pylist()
        values[1]["window_start"] = start
        pq.write_table(pa.Table.from_pylist(values, columns_of(SUM)), stray.files[0])
        table.publish([stray])
    for now_ms in (HOURS_LATER, DAYS_LATER):
        table.maintain(never, now_ms)
        assert folders(table) == [AN_HOUR[1].name, "rows-20261110"]
        assert [table.rows(slice_.name).num_rows for slice_ in AN_HOUR[:3]] == [1, 2, 1]


def test_a_file_without_statistics_stays_as_it_is_and_a_folded_one_is_looked_into(tmp_path: Path) -> None:
    unknown = Stored("slice=20261110T100000Z/0.parquet", 10, 5, None, None)
    assert list(due([unknown] * 3, SUM, DAYS_LATER)) == []
    assert unknown.may_touch(AN_HOUR[30])
    assert not unknown.lies_in(AN_HOUR[0])


def test_large_slices_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "GOOD_FILE_BYTES", 1000)
    table = publish(tmp_path, AN_HOUR[:3])
    table.maintain(never, DAYS_LATER)
    assert folders(table) == [slice_.name for slice_ in AN_HOUR[:3]]


def test_a_folded_file_has_a_bounded_size_and_no_slice_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = publish(tmp_path, AN_HOUR[:10])
    size = max(files_with_sizes(table._table).values())
    monkeypatch.setattr(folding, "_MOST_BYTES", 4 * size)
    before = content(table, AN_HOUR[:10])
    table.maintain(never, HOURS_LATER)
    assert folders(table) == ["rows-20261110"] * 3
    assert content(table, AN_HOUR[:10]) == before
    files = [Stored(f"slice={slice_.name}/{n}", 10, 1, None, None) for slice_ in AN_HOUR for n in (0, 1, 2)]
    files = [f._replace(first=s.start_ms * 1000, last=s.start_ms * 1000) for f in files for s in [of(f)]]
    monkeypatch.setattr(folding, "_MOST_FILES", 7)
    folds = list(due(files, SUM, HOURS_LATER))
    assert [len(each.files) for each in folds] == [6] * 30
    assert [file for each in folds for file in each.files] == files


def of(file: Stored) -> Slice:
    return slice_named(SUM, value_of(file.path))


def test_a_file_that_cannot_be_read_stops_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slices = spread(3, 2)
    table = publish(tmp_path, slices)
    torn = next((table.path / f"slice={slices[2].name}").iterdir())
    torn.write_bytes(b"PAR1 and no more")
    pq.write_table(rows_of(SUM, slices[0], 1, 2), next((table.path / f"slice={slices[0].name}").iterdir()))
    with caplog.at_level(logging.ERROR):
        table.maintain(never, HOURS_LATER + 2 * HOUR_MS)
    assert folders(table) == [*(slice_.name for slice_ in slices[:4]), "rows-20261110"]
    assert "files of rolling_sum of 20261110 are not folded: Could not open Parquet" in caplog.text
    assert "they have 3 rows, but 2 by the log of the table" in caplog.text
    assert list(table.staging.iterdir()) == []


# -- Turns, crashes, other writers --


def test_a_turn_is_bounded_and_the_next_one_goes_on(tmp_path: Path) -> None:
    table = publish(tmp_path, spread(5, 2))
    for left in (4, 3):
        table.fold(never, HOURS_LATER + 10 * HOUR_MS, seconds=0)
        assert len(folders(table)) == left * 2 + 5 - left
    table.fold(never, HOURS_LATER + 10 * HOUR_MS)
    assert folders(table) == ["rows-20261110"] * 5


def test_one_whose_lease_is_lost_folds_nothing(tmp_path: Path) -> None:
    table = publish(tmp_path, AN_HOUR[:3])

    def lost() -> None:
        raise Refusal("another has taken over")

    with pytest.raises(Refusal, match="taken over"):
        table.maintain(lost, HOURS_LATER)
    assert folders(FinalTable.open(tmp_path, SUM)) == [slice_.name for slice_ in AN_HOUR[:3]]


def test_one_who_folds_while_another_publishes_changes_nothing(tmp_path: Path) -> None:
    sleeper = publish(tmp_path, AN_HOUR[:3])
    table = publish(tmp_path, AN_HOUR[:1], 2)
    with pytest.raises(OvertakenError, match="another writer has committed"):
        sleeper.maintain(never, HOURS_LATER)
    table = FinalTable.open(tmp_path, SUM)
    assert folders(table) == [slice_.name for slice_ in AN_HOUR[:3]]
    assert len(relation(tmp_path)) == 4
    # The same holds the other way round.
    sleeper = FinalTable.open(tmp_path, SUM)
    table.maintain(never, HOURS_LATER)
    with sleeper.staged() as stage, pytest.raises(OvertakenError, match="another writer has committed"):
        sleeper.publish([staged(stage, AN_HOUR[1], 2, SUM, 2)])
    assert len(relation(tmp_path)) == 4


def folding_and_publishing(lake: Path) -> None:
    """Fold slices, then publish two of them again."""
    table = FinalTable.open(lake, SUM)
    table.maintain(never, HOURS_LATER)
    with table.staged() as stage:
        table.publish([staged(stage, slice_, 2, SUM, 2) for slice_ in AN_HOUR[1:3]])


def test_who_dies_anywhere_leaves_what_was_there_before_or_the_new(tmp_path: Path) -> None:
    def ready(name: str) -> Path:
        publish(tmp_path / name, AN_HOUR[:4])
        return tmp_path / name

    operations = finals.count_operations(folding_and_publishing, ready("reference"))
    # The fold places one file and commits. The publish stages windows, and places the headers, two slices of rows and
    # the remaining rows of the folded file; then it commits.
    assert operations.count("commit") == 2
    assert operations.count("place") == 1 + 1 + 2 + 1
    published = len(operations) - 1
    for at, moment in [(at, moment) for at in range(len(operations)) for moment in ("before", "after")]:
        lake = ready(f"{at}-{moment}")
        with finals.dying(at, moment), pytest.raises(finals.Died):
            folding_and_publishing(lake)
        new = (at, moment) == (published, "after")
        table = FinalTable.open(lake, SUM)
        rows = {slice_: 2 if new and slice_ in AN_HOUR[1:3] else 1 for slice_ in AN_HOUR[:4]}
        assert {slice_: table.rows(slice_.name).num_rows for slice_ in rows} == rows
        assert {slice_: table.headers()[slice_.name].version for slice_ in rows} == rows
        assert len(relation(lake)) == sum(rows.values())
        table.maintain(never, HOURS_LATER)
        if not new:
            folding_and_publishing(lake)
        assert len(relation(lake)) == 6


def test_a_fold_is_durable_before_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, kept = publish(tmp_path, AN_HOUR[:3]), list[str]()
    keep = FencedTable._keep

    def seen(self: FencedTable, actions: Sequence[Any]) -> None:
        keep(self, actions)
        kept.extend(action.path for action in actions if (self.path / action.path).is_file())

    monkeypatch.setattr(FencedTable, "_keep", seen)
    table.maintain(never, HOURS_LATER)
    (folded,) = (file for file in files_with_sizes(table._table) if ROWS_SLICE in file)
    assert folded in kept


def test_a_fold_tells_readers_of_changes_that_no_row_has_changed(tmp_path: Path) -> None:
    table = publish(tmp_path, AN_HOUR[:3])
    table.maintain(never, HOURS_LATER)
    (entry,) = table.path.glob(f"_delta_log/{table.version:020}.json")
    assert entry.read_text().count('"dataChange":false') == 4
    assert '"dataChange":true' not in entry.read_text()
    assert next(table.metadata())[1] == {"folded": "20261110"}


# -- All of it, in any order --

SOME = [slice_at(SUM, T0 + hour * HOUR_MS + minute * 60_000) for hour in (0, 1, 15) for minute in (0, 30)]
Step = tuple[str, Any]
STEPS = st.one_of(
    st.tuples(
        st.just("publish"), st.tuples(st.sets(st.sampled_from(SOME), min_size=1), st.integers(0, 3), st.booleans())
    ),
    st.tuples(st.just("fold"), st.sampled_from([T0, T0 + 4 * HOUR_MS, T0 + 17 * HOUR_MS, DAYS_LATER, DAYS_LATER * 2])),
    st.tuples(st.just("roll back"), st.tuples(st.sampled_from(SOME), st.integers(1, 4))),
)


@settings(max_examples=12, deadline=None)
@given(steps=st.lists(STEPS, min_size=3, max_size=14))
def test_whatever_is_published_folded_and_rolled_back_each_slice_has_its_rows(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Told(Path(folder)).all(steps)


class Told:
    """The published versions in plain dicts, beside the table."""

    def __init__(self, lake: Path) -> None:
        self.lake = lake
        # Slice -> per version its rows with the columns of MORE, and whether they were written with these columns.
        self.versions: dict[Slice, list[tuple[list[dict[str, Any]], bool]]] = {slice_: [] for slice_ in SOME}

    def all(self, steps: Sequence[Step]) -> None:
        for kind, what in steps:
            {"publish": self.publish, "fold": self.fold, "roll back": self.roll_back}[kind](what)
            self.judge()
        table = FinalTable.open(self.lake, MORE)
        for slice_, versions in self.versions.items():
            for number, (rows, _) in enumerate(versions, 1):
                assert (
                    rollback.earlier(PipelineLake(self.lake, MORE), table, slice_.name, number)[1].to_pylist() == rows
                )

    def publish(self, what: tuple[set[Slice], int, bool]) -> None:
        slices, rows, more = what
        pipeline, table = MORE if more else SUM, FinalTable.open(self.lake, MORE if more else SUM)
        with table.staged() as stage:
            publications = []
            for slice_ in sorted(slices):
                version = len(self.versions[slice_]) + 1
                publications.append(staged(stage, slice_, version, pipeline, rows))
                values = rows_of(pipeline, slice_, version, rows).to_pylist()
                filled = [{name: row.get(name) for name in columns_of(MORE).names} for row in values]
                self.versions[slice_].append((filled, more or not rows))
            table.publish(publications)

    def fold(self, now_ms: int) -> None:
        table = FinalTable.open(self.lake, MORE)
        table.maintain(never, now_ms)
        version = table.version
        if now_ms > DAYS_LATER:
            table.maintain(never, now_ms)
            assert len(folders(table)) <= 2 * 2 * 3
        else:
            table.maintain(never, now_ms)
            assert table.version == version

    def roll_back(self, what: tuple[Slice, int]) -> None:
        slice_, to = what
        versions = self.versions[slice_]
        if to >= len(versions):
            return
        table = FinalTable.open(self.lake, MORE)
        old, rows = rollback.earlier(PipelineLake(self.lake, MORE), table, slice_.name, to)
        header = replace(old, version=len(versions) + 1)
        with table.staged() as stage:
            files = rollback._stage_again(stage, header, rows)
            table.publish([Publication(header=header, files=files)])
        versions.append((versions[to - 1][0], True))

    def judge(self) -> None:
        table = FinalTable.read(self.lake, MORE)
        if table is None:
            return
        headers, total = table.headers(), 0
        places = [(value_of(file.path), file) for file in stored(table._table)]
        for slice_, versions in self.versions.items():
            rows, columns = versions[-1] if versions else ([], True)
            found = table.rows(slice_.name)
            assert found.sort_by("window_start").to_pylist() == rows
            assert table.has_columns_of_now(slice_.name) is columns
            assert (headers[slice_.name].version if slice_.name in headers else 0) == len(versions)
            own = sum(file.rows or 0 for value, file in places if value == slice_.name)
            assert own in (0, len(rows))
            total += len(rows)
        assert sum(file.rows or 0 for _, file in places) == total
