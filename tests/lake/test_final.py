"""The final table on real files: one commit per publish, and a crash before, after and inside every file operation."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from jobs.finality import publishing, rollback
from jobs.finality.run.folder import ENDED_KEPT_SECONDS, Plan, RunFolder, Work, discard_old, slices_left
from jobs.finality.run.tries import StagedSlice
from jobs.lake.columns import checksum, columns_of
from jobs.lake.delta import fenced
from jobs.lake.delta.fenced import FencedTable, OvertakenError
from jobs.lake.final import FinalTable, set_properties
from jobs.lake.final_topic import tombstones
from jobs.lake.ledger import LateCountPosition, Ledger
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.publication import Publication, PublishedMeanwhileError
from jobs.lake.slices import Boundary, Header, LedgerLine, State
from jobs.pipelines import PIPELINES
from jobs.pipelines.slices import Slice, slice_named
from jobs.pipelines.window import Measure
from jobs.query.lake import Lake
from jobs.refusal import Refusal
from tests.finality.test_due import header as header_of

SUM = PIPELINES["rolling_sum"]
FIRST, SECOND = (slice_named(SUM, name) for name in ("20261118T235900Z", "20261119T000000Z"))


class Died(BaseException):
    """The process ends here."""


def windows(slice_: Slice, version: int) -> pa.Table:
    """As many windows as the version number, each with the version in its total."""
    rows = [
        {
            "window_start": datetime.fromtimestamp(slice_.start_ms / 1000 + number, UTC),
            "window_end": datetime.fromtimestamp(slice_.start_ms / 1000 + number + 1, UTC),
            "key": "k",
            "total": Decimal(version),
            "mean": Decimal(version),
            "events": 1,
        }
        for number in range(version)
    ]
    return pa.Table.from_pylist(rows, schema=columns_of(SUM))


def header(slice_: Slice, version: int) -> Header:
    return header_of(
        slice_,
        version=version,
        as_of_ms=slice_.end_ms,
        run=f"run-{version}",
        rows=version,
        events=version,
        checksum=checksum(SUM, windows(slice_, version)),
    )


def staged(folder: Path, slice_: Slice, version: int) -> Publication:
    """Two files, as a large slice has."""
    rows, files = windows(slice_, version), []
    signed = rows.append_column("version", pa.array([version] * version, pa.int64()))
    for number in range(2):
        file = folder / f"slice={slice_.name}" / f"{number}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        half = signed.slice(0, version // 2) if number == 0 else signed.slice(version // 2)
        pq.write_table(half, file)
        files.append(file)
    return Publication(header=header(slice_, version), files=tuple(files))


def publish(lake: Path, version: int, slices: tuple[Slice, ...] = (FIRST, SECOND)) -> FinalTable:
    table = FinalTable.open(lake, SUM)
    folder = table.new_stage()
    table.publish([staged(folder, slice_, version) for slice_ in slices])
    return table


def seen(lake: Path) -> dict[str, set[tuple[int, int, int]]]:
    """The rows that a reader is served: per slice the versions, each with its number of windows and their total."""
    sql = """SELECT strftime(time_bucket(INTERVAL '1 minute', window_start), '%Y%m%dT%H%M%SZ') AS slice, version,
        count(*) AS rows, max(total) AS total FROM rolling_sum GROUP BY ALL"""
    found: dict[str, set[tuple[int, int, int]]] = {}
    for row in Lake(lake).query(sql).to_pylist():
        found.setdefault(row["slice"], set()).add((row["version"], row["rows"], int(row["total"])))
    return found


def both(version: int) -> dict[str, set[tuple[int, int, int]]]:
    return {slice_.name: {(version, version, version)} for slice_ in (FIRST, SECOND)}


def test_rows_and_headers_come_and_go_in_one_commit(tmp_path: Path) -> None:
    table = publish(tmp_path, 1)
    assert table.version == 1
    assert seen(tmp_path) == both(1)
    table = publish(tmp_path, 2)
    assert table.version == 2
    assert seen(tmp_path) == both(2)
    assert table.headers() == {slice_.name: header(slice_, 2) for slice_ in (FIRST, SECOND)}
    assert (table.header(FIRST.name), table.header("20261118T235800Z")) == (header(FIRST, 2), None)
    assert table.rows(FIRST.name).sort_by("window_start") == windows(FIRST, 2)


def test_an_older_version_can_be_read_again(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    table = publish(tmp_path, 2)
    at = table.table_version_with(FIRST.name, 1)
    then = FinalTable.read(tmp_path, SUM, at)
    assert then is not None
    assert then.rows(FIRST.name) == windows(FIRST, 1)
    assert table.table_version_with(FIRST.name, 3) is None


def test_only_headers_say_of_which_days_slices_are_final(tmp_path: Path) -> None:
    """Files with rows lie in folders that are named after slices, beside those of the headers."""
    table = publish(tmp_path, 1)
    by_day = Counter(slice_.name[:8] for slice_ in (FIRST, SECOND))
    assert (table.days(), table.slices_by_day()) == (sorted(by_day), by_day)
    assert (table.days_changed_since(0), table.days_changed_since(table.newest_ms() + 1)) == (set(by_day), set())


def test_an_empty_slice_has_a_header_and_no_rows(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    table = FinalTable.open(tmp_path, SUM)
    table.publish([Publication(header=replace(header(FIRST, 2), rows=0), files=())])
    assert set(seen(tmp_path)) == {SECOND.name}
    assert table.headers()[FIRST.name].version == 2


def test_a_slice_that_is_at_another_version_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    with pytest.raises(PublishedMeanwhileError, match="is at version 1 by run run-1, not at 2 as run run-3 had"):
        publish(tmp_path, 3)
    assert seen(tmp_path) == both(1)


def test_one_who_slept_while_another_published_commits_nothing(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    sleeper = FinalTable.open(tmp_path, SUM)
    publication = staged(sleeper.new_stage(), FIRST, 2)
    publish(tmp_path, 2, (SECOND,))
    with pytest.raises(OvertakenError, match="another writer has committed"):
        sleeper.publish([publication])
    assert seen(tmp_path) == {**both(1), SECOND.name: {(2, 2, 2)}}


def test_a_new_measure_is_a_new_column_and_a_new_type_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    wider = replace(SUM, measures=(*SUM.measures, Measure(name="least", sql="min(value)", type="DECIMAL(18,6)")))
    assert "least" in FinalTable.open(tmp_path, wider).rows(FIRST.name).column_names
    changed = replace(SUM, measures=(Measure(name="total", sql="sum(value)", type="BIGINT"), *SUM.measures[1:]))
    with pytest.raises(Refusal, match=r"holds rows of another type .*give the measure another name"):
        FinalTable.open(tmp_path, changed)


def test_slices_of_another_length_are_refused(tmp_path: Path) -> None:
    table = publish(tmp_path, 1)
    hours = FinalTable.open(tmp_path, replace(SUM, slice_seconds=3600))
    assert table.headers()
    with pytest.raises(Refusal, match="has slices of 60 s, the definition says slice_seconds=3600"):
        hours.headers()


# -- A crash before, after and inside every file operation --

Operation = Callable[..., Any]


@contextmanager
def dying(at: int, moment: str) -> Iterator[list[str]]:
    """End the process before, inside or after the file operation with this number."""
    done: list[str] = []

    def wrapped(name: str, real: Operation, torn: Operation | None) -> Operation:
        def call(*arguments: Any, **named: Any) -> Any:
            number = len(done)
            done.append(name)
            if number != at:
                return real(*arguments, **named)
            if moment == "inside" and torn:
                torn(*arguments)
            if moment == "after":
                real(*arguments, **named)
            raise Died(name)

        return call

    # The original method, since the patch below replaces it.
    write_bytes = Path.write_bytes

    def half_written(_table: pa.Table, file: str, **_: object) -> None:
        write_bytes(Path(file), b"PAR1 and no more")

    def half(file: Path, content: bytes) -> None:
        write_bytes(file, content[: len(content) // 2])

    with pytest.MonkeyPatch.context() as patch:
        # A rename and a commit happen completely or not at all; a file may be half written.
        patch.setattr(Path, "write_bytes", wrapped("text", Path.write_bytes, half))
        patch.setattr(Path, "replace", wrapped("replace", Path.replace, None))
        write = wrapped("write", pq.write_table, half_written)
        patch.setattr(pq, "write_table", write)
        patch.setattr(FencedTable, "place", wrapped("place", FencedTable.place, None))
        patch.setattr(FencedTable, "transact", wrapped("commit", FencedTable.transact, None))
        yield done


def count_operations(work: Callable[[Path], object], lake: Path) -> list[str]:
    with dying(-1, "never") as done:
        work(lake)
    return done


def again(lake: Path) -> None:
    """Publish version 2 of both slices, from staged files that are there already."""
    table = FinalTable.open(lake, SUM)
    table.publish([staged_before(lake, slice_) for slice_ in (FIRST, SECOND)])


def staged_before(lake: Path, slice_: Slice) -> Publication:
    files = sorted((lake / "staged" / f"slice={slice_.name}").glob("*.parquet"))
    return Publication(header=header(slice_, 2), files=tuple(files))


def ready(lake: Path) -> Path:
    publish(lake, 1)
    for slice_ in (FIRST, SECOND):
        staged(lake / "staged", slice_, 2)
    return lake


def test_a_publish_that_dies_anywhere_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    operations = count_operations(again, ready(tmp_path / "reference"))
    assert operations == ["write", "place"] * 2 + ["place"] * 4 + ["commit"]
    trials = [(at, moment) for at in range(len(operations)) for moment in ("before", "inside", "after")]
    for at, moment in trials:
        lake = ready(tmp_path / f"{at}-{moment}")
        with dying(at, moment), pytest.raises(Died):
            again(lake)
        published = (operations[at], moment) == ("commit", "after")
        assert seen(lake) == both(2 if published else 1), f"{moment} {operations[at]} {at}"
        # The same run goes again, as Airflow does it; then another run follows.
        if not published:
            again(lake)
        assert seen(lake) == both(2)
        publish(lake, 3)
        assert seen(lake) == both(3)


def work_of(slice_: str, events: int = 1) -> Work:
    boundary = Boundary(topic_id="t1", ends={0: 5})
    return Work(slice=slice_, version=0, reason="closed", boundary=boundary, events=events, window_events=events)


def plan_of(run: str, *work: Work, as_of_ms: int = 1) -> Plan:
    return Plan(
        pipeline=SUM.name,
        run=run,
        as_of_ms=as_of_ms,
        fingerprint=SUM.fingerprint,
        checks=SUM.checks_fingerprint,
        topic_id="t1",
        offsets={0: 5},
        events_version=1,
        work=work,
    )


def test_a_run_folder_that_dies_anywhere_has_whole_documents_or_none(tmp_path: Path) -> None:
    """The run writes the documents that its tasks hand to each other; then the same run goes again."""

    def whole(lake: Path) -> None:
        folder = RunFolder.of(PipelineLake(lake, SUM), "r")
        folder.begin(plan_of("r", work_of(FIRST.name)))
        folder.keep_staged({FIRST.name: StagedSlice(read=1)})
        folder.keep_verdicts({FIRST.name: {"passed": True}})
        folder.keep_replaced_windows(FIRST.name, windows(FIRST, 1).select(["window_start", "key"]))
        folder.end()

    operations = count_operations(whole, tmp_path / "reference")
    assert operations == ["text", "replace"] * 3 + ["write", "replace"] + ["text", "replace"]
    for at in range(len(operations)):
        for moment in ("before", "inside", "after"):
            lake = tmp_path / f"{at}-{moment}"
            with dying(at, moment), pytest.raises(Died):
                whole(lake)
            folder = RunFolder.of(PipelineLake(lake, SUM), "r")
            done = at if moment != "after" else at + 1
            assert (folder.verdicts() is None) is (done < 6)
            assert (folder.staged() is None) is (done < 4)
            assert (folder.replaced_windows(FIRST.name) is None) is (done < 8)
            if done < 2:
                with pytest.raises(Refusal, match="holds no plan"):
                    folder.plan()
            else:
                assert folder.plan() == plan_of("r", work_of(FIRST.name))
            whole(lake)
            assert (folder.plan(), folder.verdicts()) == (
                plan_of("r", work_of(FIRST.name)),
                {FIRST.name: {"passed": True}},
            )


def test_of_an_outage_the_newest_run_stays_and_those_whose_slices_it_has_planned_go(tmp_path: Path) -> None:
    """Each schedule leaves a run that was killed before its audit."""
    hours_ago = {f"r{number}": 30 - number for number in range(20)}
    for run in hours_ago:
        RunFolder.of(PipelineLake(tmp_path, SUM), run).begin(plan_of(run, work_of(FIRST.name), work_of(SECOND.name)))
    for run in ("restated", "audited", "replaced", "under way", "a stage"):
        RunFolder.of(PipelineLake(tmp_path, SUM), run).begin(plan_of(run, work_of(FIRST.name)))
    RunFolder.of(PipelineLake(tmp_path, SUM), "restated").begin(plan_of("restated", work_of("20200101T000000Z")))
    RunFolder.of(PipelineLake(tmp_path, SUM), "audited").keep_verdicts({FIRST.name: {"passed": False}})
    RunFolder.of(PipelineLake(tmp_path, SUM), "replaced").keep_replaced_windows(
        FIRST.name, windows(FIRST, 1).select(["window_start", "key"])
    )
    (RunFolder.of(PipelineLake(tmp_path, SUM), "a stage").path / "plan.json").unlink()
    for run, hours in {**hours_ago, "restated": 40, "audited": 40, "replaced": 40, "under way": 0.5}.items():
        moment = time.time() - hours * 3600
        os.utime(RunFolder.of(PipelineLake(tmp_path, SUM), run).path / "plan.json", (moment, moment))
    before = slices_left(PipelineLake(tmp_path, SUM))
    assert discard_old(PipelineLake(tmp_path, SUM), and_abandoned=True) == 19
    stay = ("r19", "restated", "audited", "replaced", "under way", "a stage")
    left = {folder.name for folder in (tmp_path / SUM.final_table / "_staging").iterdir()}
    assert left == {RunFolder.of(PipelineLake(tmp_path, SUM), run).path.name for run in stay}
    assert slices_left(PipelineLake(tmp_path, SUM)) == before


def test_less_than_was_judged_is_not_published(tmp_path: Path) -> None:
    ready(tmp_path)
    next((tmp_path / "staged" / f"slice={FIRST.name}").glob("*.parquet")).unlink()
    with pytest.raises(Refusal, match="1 rows of slice 20261118T235900Z are staged, but its audit judged 2"):
        again(tmp_path)
    assert seen(tmp_path) == both(1)


def entry(version: int, state: State = State.FINAL) -> LedgerLine:
    boundary = Boundary(topic_id="t1", ends={0: 5})
    return LedgerLine(slice=FIRST.name, state=state, at_ms=version, run="r", version=version, boundary=boundary)


def test_the_ledger_that_dies_anywhere_has_the_line_or_not(tmp_path: Path) -> None:
    def tell(lake: Path) -> None:
        Ledger.open(lake, SUM).append([entry(2)], counted=LateCountPosition(topic_id="t1", ends={0: 7}))

    Ledger.open(tmp_path / "reference", SUM).append([entry(1)])
    operations = count_operations(tell, tmp_path / "reference")
    for at in range(len(operations)):
        for moment in ("before", "inside", "after"):
            lake = tmp_path / f"{at}-{moment}"
            Ledger.open(lake, SUM).append([entry(1)])
            with dying(at, moment), pytest.raises(Died):
                tell(lake)
            told = (operations[at], moment) == ("commit", "after")
            ledger = Ledger.open(lake, SUM)
            assert ledger.newest_of(ledger.days()) == {FIRST.name: entry(2 if told else 1)}
            assert ledger.late_count_position() == (LateCountPosition(topic_id="t1", ends={0: 7}) if told else None)
            ledger.append([entry(3, State.REOPENED)])
            again = Ledger.open(lake, SUM)
            assert again.newest_of(again.days()) == {FIRST.name: entry(3, State.REOPENED)}


def test_of_settled_slices_the_ledger_gives_the_name_alone(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path, SUM)
    late, behind, unknown = (
        replace(entry(1), slice=name) for name in ("20261118T120000Z", "20261118T120100Z", "20261118T120200Z")
    )
    lines = [entry(1), replace(late, late=2), behind, unknown]
    ledger.append(lines)
    versions = {FIRST.name: 1, late.slice: 1, behind.slice: 2}
    entries, settled = ledger.unsettled({"20261118"}, versions)
    assert settled == {FIRST.name}
    assert set(entries) == {late.slice, behind.slice, unknown.slice}
    assert entries == {name: line for name, line in ledger.newest_of(ledger.days()).items() if name != FIRST.name}
    ledger.append([entry(1, State.AUDITING)])
    assert ledger.unsettled({"20261118"}, versions)[1] == set()
    assert ledger.unsettled({"20260101"}, versions) == ({}, set())


def test_a_ledger_of_an_older_version_does_not_say_what_came_in_time(tmp_path: Path, monkeypatch: Any) -> None:
    from jobs.lake import ledger as module

    late = replace(entry(1), slice=SECOND.name, late=2)
    with monkeypatch.context() as patch:
        patch.setattr(module, "SCHEMA", module.SCHEMA.remove(module.SCHEMA.get_field_index("in_time")))
        Ledger.open(tmp_path, SUM).append([entry(1), late], counted=LateCountPosition(topic_id="t1", ends={0: 7}))
    told = {FIRST.name: entry(1), SECOND.name: replace(late, in_time=None)}
    read = Ledger.read(tmp_path, SUM)
    assert read is not None
    assert read.newest_of(read.days()) == told
    monkeypatch.setattr(module, "_MERGE_EVERY_COMMITS", 1)
    ledger = Ledger.open(tmp_path, SUM)
    assert ledger.newest_of(ledger.days()) == told
    assert ledger.late_count_position() == LateCountPosition(topic_id="t1", ends={0: 7})
    ledger.append([replace(late, version=2, in_time=1)])
    read = Ledger.read(tmp_path, SUM)
    assert read is not None
    assert [line.in_time for line in read.history(SECOND.name)] == [None, 1]
    assert read.newest_of(read.days()) == {FIRST.name: entry(1), SECOND.name: replace(late, version=2, in_time=1)}
    assert Lake(tmp_path).query("SELECT count(*) AS lines FROM ledger_rolling_sum").to_pylist() == [{"lines": 3}]


def test_the_ledger_keeps_its_order_when_small_files_are_merged(tmp_path: Path, monkeypatch: Any) -> None:
    from jobs.lake import ledger as module

    monkeypatch.setattr(module, "_MERGE_EVERY_COMMITS", 3)
    ledger = Ledger.open(tmp_path, SUM)
    for version in range(1, 9):
        ledger.append([entry(version)], counted=LateCountPosition(topic_id="t1", ends={0: version}))
    read = Ledger.read(tmp_path, SUM)
    assert read is not None
    assert [line.version for line in read.history(FIRST.name)] == list(range(1, 9))
    assert read.late_count_position() == LateCountPosition(topic_id="t1", ends={0: 8})
    assert len(fenced.files_with_sizes(read._table)) < 4


# -- A definition that has changed, and the messages of the topic --


def test_rows_from_before_a_measure_was_added_can_be_read(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    more = replace(SUM, measures=(*SUM.measures, Measure(name="highest", sql="max(value)", type="DECIMAL(12,6)")))
    table = FinalTable.open(tmp_path, more)
    assert table.rows(FIRST.name).column("highest").to_pylist() == [None]
    old = FinalTable.read(tmp_path, more, version=1)
    assert old is not None
    assert old.rows(FIRST.name).column("highest").to_pylist() == [None]


def test_what_is_rolled_back_to_other_columns_has_the_checksum_of_what_is_served(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    table = publish(tmp_path, 2)
    more = replace(SUM, measures=(*SUM.measures, Measure(name="highest", sql="max(value)", type="DECIMAL(12,6)")))
    for pipeline in (SUM, more):
        found, rows = rollback.earlier(PipelineLake(tmp_path, pipeline), table, FIRST.name, 1)
        assert rows.column_names == columns_of(pipeline).names
        assert found.checksum == checksum(pipeline, rows)
    assert rollback.earlier(PipelineLake(tmp_path, SUM), table, FIRST.name, 1)[0] == header(FIRST, 1)


def test_files_of_older_versions_go_when_nobody_can_roll_back_to_them(tmp_path: Path, monkeypatch: Any) -> None:
    from jobs.lake import final as module

    at_once = {"delta.deletedFileRetentionDuration": "interval 0 seconds"}
    monkeypatch.setattr(module, "_retention", lambda: at_once)
    for version in (1, 2, 3):
        table = publish(tmp_path, version)
    there = set(table.path.glob("slice=*/*.parquet"))
    table.maintain(lambda: None, now_ms=0)
    left = {str(file.relative_to(table.path)) for file in table.path.glob("slice=*/*.parquet")}
    assert left == set(fenced.files_with_sizes(table._table))
    assert len(left) < len(there)
    assert seen(tmp_path) == both(3)


def kept_of(lake: Path) -> set[str | None]:
    """For how long the table keeps its log and the files that were replaced."""
    there = DeltaTable(lake / SUM.final_table).metadata().configuration
    return {there.get("delta.logRetentionDuration"), there.get("delta.deletedFileRetentionDuration")}


def test_versions_are_kept_for_as_long_as_the_setting_says_also_of_a_table_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 1)
    assert kept_of(tmp_path) == {"interval 30 days"}
    monkeypatch.setenv("FINAL_VERSIONS_KEPT_DAYS", "7")
    table = publish(tmp_path, 2)
    assert (kept_of(tmp_path), table.version) == ({"interval 7 days"}, 3)
    assert publish(tmp_path, 3).version == 4, "nothing is written where they agree"
    assert seen(tmp_path) == both(3)
    assert rollback.earlier(PipelineLake(tmp_path, SUM), FinalTable.open(tmp_path, SUM), FIRST.name, 1)[0] == header(
        FIRST, 1
    )
    with pytest.raises(Refusal, match=r"are kept for FINAL_VERSIONS_KEPT_DAYS=7 days"):
        rollback.earlier(PipelineLake(tmp_path, SUM), FinalTable.open(tmp_path, SUM), FIRST.name, 9)


def test_a_writer_that_was_overtaken_changes_no_properties(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    stale = DeltaTable(tmp_path / SUM.final_table)
    publish(tmp_path, 2)
    with pytest.raises(OvertakenError, match="another writer has committed to "):
        set_properties(stale, tmp_path / SUM.final_table, {"delta.logRetentionDuration": "interval 1 days"})
    assert kept_of(tmp_path) == {"interval 30 days"}
    assert seen(tmp_path) == both(2)


def test_a_ledger_and_a_publish_leave_no_stage_behind(tmp_path: Path) -> None:
    Ledger.open(tmp_path, SUM).append([entry(1)])
    assert list((tmp_path / SUM.ledger_table / "_staging").iterdir()) == []
    table = FinalTable.open(tmp_path, SUM)
    with table.staged() as stage:
        table.publish([staged(stage, FIRST, 1)])
    assert list((tmp_path / SUM.final_table / "_staging").iterdir()) == []


def test_windows_that_are_gone_are_told_also_if_two_runs_died_before_they_told(tmp_path: Path) -> None:
    """Version 1 has a window that neither 2 nor 3 has, and the run of version 2 sent no messages."""
    publish(tmp_path, 1)
    RunFolder.of(PipelineLake(tmp_path, SUM), "run-2").keep_replaced_windows(
        FIRST.name, windows(FIRST, 5).select(["window_start", "key"])
    )
    table = publish(tmp_path, 2)
    publishing.keep_replaced_windows(PipelineLake(tmp_path, SUM), table, table.headers()[FIRST.name], "run-3")
    gone = RunFolder.of(PipelineLake(tmp_path, SUM), "run-3").replaced_windows(FIRST.name)
    assert gone is not None
    told = dict(tombstones(SUM, gone, publish(tmp_path, 3).rows(FIRST.name)))
    starts = ("2026-11-18T23:59:03.000Z", "2026-11-18T23:59:04.000Z")
    assert told == {f'["{start}","k"]'.encode(): None for start in starts}


def test_a_run_that_is_over_is_kept_for_a_while(tmp_path: Path) -> None:
    folder = RunFolder.of(PipelineLake(tmp_path, SUM), "r")
    folder.keep_replaced_windows(FIRST.name, windows(FIRST, 1).select(["window_start", "key"]))
    folder.end()
    discard_old(PipelineLake(tmp_path, SUM), and_abandoned=True)
    assert folder.path.exists()
    long_ago = time.time() - ENDED_KEPT_SECONDS - 1
    os.utime(folder.path / "ended.json", (long_ago, long_ago))
    discard_old(PipelineLake(tmp_path, SUM), and_abandoned=True)
    assert not folder.path.exists()


@pytest.mark.parametrize("planned", [True, False])
def test_a_run_that_nobody_ends_is_given_up_after_a_week(tmp_path: Path, planned: bool) -> None:
    """The same holds for a stage of the table's own, which lies beside the folders of runs and has no plan."""
    folder = RunFolder.of(PipelineLake(tmp_path, SUM), "r")
    (folder.path / "windows-1" / "slice=a").mkdir(parents=True)
    if planned:
        folder.begin(plan_of("r", work_of(FIRST.name)))
    for days, is_there in ((6, True), (8, False)):
        long_ago = time.time() - days * 24 * 3600
        for path in (folder.path, *folder.path.glob("plan.json")):
            os.utime(path, (long_ago, long_ago))
        discard_old(PipelineLake(tmp_path, SUM), and_abandoned=True)
        assert folder.path.exists() is is_there


def test_a_version_can_be_rolled_back_to_for_as_long_as_its_files_are_kept(tmp_path: Path) -> None:
    """It does not matter how long ago the version was published: the log forgets it before its files are deleted."""
    publish(tmp_path, 1)
    for minute in range(3):
        publish(tmp_path, 1, (slice_named(SUM, f"20261120T000{minute}00Z"),))
    at = FinalTable.open(tmp_path, SUM).version
    DeltaTable(tmp_path / SUM.final_table).create_checkpoint()
    table = publish(tmp_path, 2)
    for number in range(at):
        (tmp_path / SUM.final_table / "_delta_log" / f"{number:020}.json").unlink()
    header, rows = rollback.earlier(PipelineLake(tmp_path, SUM), table, FIRST.name, 1)
    assert (header.version, rows.num_rows) == (1, 1)
    with pytest.raises(Refusal, match=r"version 3 of slice .* is not there"):
        rollback.earlier(PipelineLake(tmp_path, SUM), table, FIRST.name, 3)


def test_no_two_runs_share_a_folder(tmp_path: Path) -> None:
    ids = ["scheduled__2026-01-31T12:00:00+00:00", "scheduled__2026-01-31T12-00-00-00-00", ".", "..", "a/b", "a-b"]
    folders = {RunFolder.of(PipelineLake(tmp_path, SUM), run).path for run in ids}
    assert len(folders) == len(ids)
    assert {folder.parent for folder in folders} == {tmp_path / SUM.final_table / "_staging"}
