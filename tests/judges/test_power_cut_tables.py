"""The power fails while rows are merged, removed, accounted for or rolled back, and while others are asked to do so."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from jobs.control import lease as lease_module
from jobs.control.epochs import Owner
from jobs.control.events_needed import read_needed_from, write_needed_from
from jobs.control.folder import Control
from jobs.finality import publishing
from jobs.finality.rollback import roll_back
from jobs.finality.run.folder import RunFolder
from jobs.lake import accounts as accounts_module
from jobs.lake import stream_tables as tables
from jobs.lake.accounts import Accounts
from jobs.lake.delta.log import entry_of
from jobs.lake.delta.reading import dataset, files_of, files_with_sizes
from jobs.lake.final import FinalTable
from jobs.lake.final_topic import window_columns
from jobs.lake.ledger import Ledger
from jobs.lake.live import Live, PruneRequest
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.slices import State
from jobs.lake.stream_tables import Manifest, TableWriter, last_note
from jobs.pipelines.layout import BATCHES_SLICE
from jobs.settings import Settings
from jobs.storage.folders import make_durable
from tests.finality.accounts import PIPELINE, Made
from tests.finality.test_account_kept import accounted, name, off
from tests.judges.power_cut import WAYS, Cut, Disk, Judge, Way, Work, cuts_of, judge_cuts
from tests.judges.test_power_cut import judge_rows
from tests.lake import test_final as finals
from tests.lake import test_stream_tables as streams
from tests.lake.test_events_kept import DAY_MS, HOUR_MS, NOON_MS, SOURCE, Events, hour_of

SUM = finals.SUM
NOTHING_KEPT = {"delta.checkpointInterval": "2", "delta.deletedFileRetentionDuration": "interval 0 seconds"}
LEASE: Any = SimpleNamespace(check=lambda: None)
NO_KAFKA: Any = None


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is done now and then is done often, and files are deleted when they are replaced."""
    for property_, value in NOTHING_KEPT.items():
        monkeypatch.setitem(tables._PROPERTIES, property_, value)
    monkeypatch.setattr(tables, "COMPACT_EVERY_COMMITS", 4)
    monkeypatch.setattr(tables, "DELETE_EVERY_SECONDS", 0)
    monkeypatch.setattr(accounts_module, "_MERGE_EVERY_COMMITS", 2)
    # A heartbeat would write files while the disk is looked at.
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 3600.0)
    # The writing process is gone, as after a power cut.
    gone = replace(Owner.this_process(), started_seconds=-1.0)
    monkeypatch.setattr(Owner, "this_process", classmethod(lambda _: gone))
    monkeypatch.setattr(publishing, "send", lambda _kafka, _topic, messages: len(list(messages)))


# -- Merges and properties of a stream's table --


def merge(lake: Path, disk: Disk) -> None:
    """Commit batches; now and then small files are merged, and those that they replace are deleted."""
    writer = streams.opened(lake / SUM.live_table)
    for batch in range(6):
        streams.commit(writer, batch)
        disk.done(f"batch {batch}")
        writer.maintain()


def judge_merge(lake: Path, reported: Sequence[str]) -> None:
    judge_rows(lake / SUM.live_table, 2, reported).maintain()


def set_properties(lake: Path, disk: Disk) -> None:
    """The setting for replaced files is changed between two starts of a driver."""
    path = lake / SUM.live_table
    streams.commit(streams.opened(path), 0)
    disk.done("batch 0")
    disk.begin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPLACED_FILES_KEPT_MINUTES", "5")
        writer = streams.opened(path, 2)
    disk.done("properties")
    streams.commit(writer, 1)
    disk.done("batch 1")


def judge_properties(lake: Path, reported: Sequence[str]) -> None:
    path = lake / SUM.live_table
    last_note(path, mends=True)
    if "properties" in reported:
        kept = DeltaTable(path).metadata().configuration["delta.deletedFileRetentionDuration"]
        assert kept == "interval 5 minutes"
    judge_rows(path, 3, reported)


def begin(lake: Path, disk: Disk) -> None:
    """The first micro-batch of a new table has no rows."""
    writer = streams.opened(lake / SUM.live_table)
    writer.commit(Manifest.of(writer.new_stage(), 0), streams.note(0))
    disk.done("batch 0")


def judge_begin(lake: Path, reported: Sequence[str]) -> None:
    path = lake / SUM.live_table
    note = last_note(path, mends=True)
    assert note == streams.note(0) or (note is None and not reported)
    assert streams.opened(path, 2).has(streams.WRITE_ID, 0) == (note is not None)


def mend(lake: Path, disk: Disk, *, and_checkpoint: bool = False) -> None:
    """A power cut has torn the newest commit, or also its checkpoint. The power fails again while a driver starts."""
    path = lake / SUM.live_table
    writer = streams.opened(path)
    for batch in range(3):
        streams.commit(writer, batch)
        if batch < 2:
            disk.done(f"batch {batch}")
    entry = entry_of(path, writer.version)
    for file in (entry, entry.with_name(f"{entry.stem}.checkpoint.parquet"))[: 1 + and_checkpoint]:
        file.write_bytes(file.read_bytes()[:100])
        make_durable(file, file.parent)
    disk.begin()
    last_note(path, mends=True)
    disk.done("mended")
    streams.commit(streams.opened(path, 2), 2)
    disk.done("batch 2")


def judge_mend(lake: Path, reported: Sequence[str]) -> None:
    judge_rows(lake / SUM.live_table, 3, reported)


# -- Live rows that are pruned, and the request for it --

ASKED = PruneRequest(before="s3", slices=("s0", "s1", "s2"))
LIVE = pa.schema(
    [
        ("number", pa.int64()),
        ("batch", pa.int64()),
        ("as_of", pa.timestamp("us", tz="UTC")),
        ("offsets", pa.string()),
        ("watermark", pa.timestamp("us", tz="UTC")),
        ("slice", pa.string()),
    ]
)


def commit_live(writer: TableWriter, batch: int) -> None:
    """Commit a live row of a slice of its own, and the row about the batch."""
    moments = {"as_of": datetime(2020, 1, 1 + batch, tzinfo=UTC), "watermark": datetime(2021, 1, 1, tzinfo=UTC)}
    row = {"batch": batch, **moments, "offsets": f'{{"0": [{batch}, 9]}}'}
    stage = writer.new_stage()
    for slice_, values in ((f"s{batch}", {"number": batch}), (BATCHES_SLICE, row)):
        file = stage / f"slice={slice_}" / "rows.parquet"
        file.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist([values], pa.schema([LIVE.field(name) for name in values])), file)
    writer.commit(Manifest.of(stage), streams.note(batch, writer.epoch))


def open_live(lake: Path, epoch: int) -> TableWriter:
    last_note(lake / SUM.live_table, mends=True)
    return TableWriter.open(lake / SUM.live_table, LIVE, "slice", epoch=epoch)


def prune(lake: Path, disk: Disk) -> None:
    """The account asks the stream to remove rows, and the stream does it."""
    writer = open_live(lake, 1)
    for batch in range(5):
        commit_live(writer, batch)
        if batch == 2:
            writer.merge_small_files(streams.note(batch).to_json())
    disk.begin()
    ASKED.write(Control.of(lake, SUM.name).documents)
    disk.done("asked")
    writer.prune(PruneRequest.read(Control.of(lake, SUM.name).documents).slices, timedelta(days=1))
    disk.done("pruned")


def judge_prune(lake: Path, reported: Sequence[str]) -> None:
    writer, request = open_live(lake, 2), PruneRequest.read(Control.of(lake, SUM.name).documents)
    commit_live(writer, 5)
    seen, every = Live.at(lake, SUM), {f"s{batch}" for batch in range(6)}
    there = seen.slices()
    assert there in (every, every - set(ASKED.slices))
    # What is pruned was asked for: an account must know that it cannot compare these slices.
    assert request == ASKED or (there == every and request == PruneRequest() and "asked" not in reported)
    assert there != every or "pruned" not in reported
    assert seen.table is not None
    rows = files_of(seen.table, seen.path).to_table().to_pylist()
    assert {f"s{row['number']}" for row in rows if row["number"] is not None} == there
    batches = sorted(row["batch"] for row in rows if row["batch"] is not None)
    assert batches == (list(range(6)) if there == every else [0, 4, 5])
    assert seen.begins("numbers") == {0: 0}


# -- Old events, and the document that says which of them are needed --

OLD = [NOON_MS - days * DAY_MS for days in (6, 5, 4)]


def remove_events(lake: Path, disk: Disk) -> None:
    events = Events(lake)
    events.land(*OLD, NOON_MS)
    write_needed_from(lake, SUM.recompute_job, OLD[1])
    disk.begin()
    for needed_ms in OLD[1:]:
        write_needed_from(lake, SUM.recompute_job, needed_ms)
        disk.done(f"needed {needed_ms}")
        events.needed_ms = read_needed_from(lake, SUM.recompute_job) or 0
        events.remove_old()
        disk.done(f"removed {needed_ms}")


def judge_events(lake: Path, reported: Sequence[str]) -> None:
    said = read_needed_from(lake, SUM.recompute_job)
    last_note(lake / SOURCE.events_table, mends=True)
    events = Events(lake, batch=9)
    events.land(NOON_MS)
    gone = [time_ms for time_ms in OLD if hour_of(time_ms) not in events.hours]
    assert gone == OLD[: len(gone)]
    assert events.from_ms == (gone[-1] + HOUR_MS if gone else 0)
    assert said is not None
    # Nothing that is needed is gone, also if the document is from before the power cut.
    assert all(time_ms < said for time_ms in gone)
    for step in reported:
        kind, _, needed_ms = step.partition(" ")
        assert said >= int(needed_ms) if kind == "needed" else set(gone) >= {t for t in OLD if t < int(needed_ms)}
    columns = ["event_time"]
    table = DeltaTable(lake / SOURCE.events_table)
    found = dataset(table, lake / SOURCE.events_table, list(files_with_sizes(table))).to_table(columns)
    assert found.num_rows == len(OLD) - len(gone) + 2


# -- Accounts --


def made_in(lake: Path) -> Made:
    return Made(replace(Settings.from_env({}), lake_root=lake))


def account(lake: Path, disk: Disk) -> None:
    """Each account has a difference and its total; now and then small files are merged."""
    for day in range(2):
        accounted(made_in(lake), day, windows=1)
        disk.done(name(day))


def accounted_for(lake: Path) -> set[str]:
    return {slice_ for slice_, _ in Accounts.open(lake, PIPELINE).done({name(day)[:8] for day in range(4)})}


def judge_account(lake: Path, reported: Sequence[str]) -> None:
    made = made_in(lake)
    done = accounted_for(lake)
    assert done >= set(reported)
    # The next account removes differences without a total.
    day = len(done)
    accounted(made, day, windows=1)
    wanted = [name(number) for number in range(day + 1)]
    assert sorted(accounted_for(lake)) == wanted
    assert [slice_ for slice_, _ in off(made)] == wanted
    assert sorted(row["slice"] for row in made.query("SELECT slice FROM drift_rolling_sum")) == wanted


# -- Roll-back, and the windows that it replaces --


def go_back(lake: Path, version: int, run: str) -> None:
    pipeline, now_ms = PipelineLake(lake, SUM), round(time.time() * 1000)
    roll_back(pipeline, NO_KAFKA, finals.FIRST.name, version, run=run, reason="a test", by="tests", now_ms=now_ms)


def back(lake: Path, disk: Disk) -> None:
    """Version 2 has a window more than version 1, to which the slice is rolled back."""
    for version in (1, 2):
        finals.publish(lake, version, (finals.FIRST,))
    disk.begin()
    go_back(lake, 1, "back")
    disk.done("back")


def judge_back(lake: Path, reported: Sequence[str]) -> None:
    final, ledger = FinalTable.open(lake, SUM), Ledger.open(lake, SUM)
    at = final.headers()[finals.FIRST.name].version
    assert at == 3 or (at == 2 and "back" not in reported)
    content = {2: 2, 3: 1}[at]
    assert final.rows(finals.FIRST.name).sort_by("window_start") == finals.windows(finals.FIRST, content)
    line = ledger.newest([finals.FIRST.name]).get(finals.FIRST.name)
    assert "back" not in reported or (line is not None and (line.state, line.version) == (State.FINAL, 3))
    folder = RunFolder.of(PipelineLake(lake, SUM), "back")
    assert "back" not in reported or folder.has_ended
    gone = folder.replaced_windows(finals.FIRST.name)
    if at == 3:
        # Its messages may not be sent yet: the window that only version 2 has needs a tombstone.
        assert gone is not None
    if gone is not None:
        assert gone.sort_by("window_start") == finals.windows(finals.FIRST, 2).select(window_columns(SUM))
    publishing.announce(
        PipelineLake(lake, SUM), NO_KAFKA, final, ledger, LEASE, [finals.FIRST.name], finals.FIRST.end_ms
    )
    go_back(lake, 1 if at == 2 else 2, "again")
    assert FinalTable.open(lake, SUM).headers()[finals.FIRST.name].version == at + 1


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A work, its judge, and a number of moments at which the power fails at least."""

    work: Work
    judge: Judge
    moments: int


SCENARIOS = {
    "merge": Scenario(work=merge, judge=judge_merge, moments=40),
    "properties": Scenario(work=set_properties, judge=judge_properties, moments=8),
    "begin": Scenario(work=begin, judge=judge_begin, moments=8),
    "prune": Scenario(work=prune, judge=judge_prune, moments=8),
    "events": Scenario(work=remove_events, judge=judge_events, moments=8),
    "account": Scenario(work=account, judge=judge_account, moments=25),
    "roll-back": Scenario(work=back, judge=judge_back, moments=20),
}
of_each = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)


@WAYS
@of_each
def test_nothing_that_was_reported_is_lost_and_work_goes_on(tmp_path: Path, scenario: Scenario, way: Way) -> None:
    assert judge_cuts(tmp_path, way, scenario.work, scenario.judge) >= scenario.moments


@pytest.mark.parametrize("and_checkpoint", [False, True])
def test_a_repair_that_is_interrupted_loses_nothing(tmp_path: Path, and_checkpoint: bool) -> None:
    work = partial(mend, and_checkpoint=and_checkpoint)
    for way in (Cut.leave_what_was_durable, Cut.leave_half_of_the_rest, Cut.leave_half_of_what_was_new):
        assert judge_cuts(tmp_path / way.__name__, way, work, judge_mend) >= 4


@of_each
def test_each_judge_objects_where_nothing_is_made_durable(
    tmp_path: Path, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(lake: Path, disk: Disk) -> None:
        monkeypatch.setattr(os, "fsync", lambda _: None)
        scenario.work(lake, disk)

    cut = cuts_of(tmp_path / "disk", work)[-1]
    cut.leave_what_was_durable(tmp_path / "left")
    (tmp_path / "left" / "lake").mkdir(exist_ok=True)
    with pytest.raises((AssertionError, KeyError, TableNotFoundError)):
        scenario.judge(tmp_path / "left" / "lake", cut.reported)
