"""The power fails at every moment of the platform's own writes: reported work stays, and new work goes on."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from jobs.control.epochs import Owner, Receipt
from jobs.control.folder import Control
from jobs.control.incidents import Incidents
from jobs.finality.planning import Planner
from jobs.finality.run.folder import RunFolder, slices_left
from jobs.finality.run.tries import StagedSlice, Try
from jobs.lake import stream_tables as tables
from jobs.lake.delta.reading import files_with_sizes, value_of
from jobs.lake.final import FinalTable
from jobs.lake.ledger import Ledger
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.slices import State
from jobs.lake.stream_tables import TableWriter, last_note
from jobs.pipelines import PIPELINES
from jobs.pipelines.layout import HOUR_MS, ROWS_SLICE
from jobs.pipelines.slices import slice_named
from jobs.refusal import Refusal
from tests.judges.power_cut import WAYS, Disk, Way, judge_cuts, watched
from tests.lake import test_final as finals
from tests.lake.test_stream_tables import SCHEMA, commit, rows

SUM = PIPELINES["rolling_sum"]
BATCHES = 4
RUN = "r"
# Another slice of the same hour.
BESIDE = slice_named(SUM, "20261118T235800Z")
PLAN = finals.plan_of(RUN, finals.work_of(finals.FIRST.name, events=2))


def work(lake: Path, disk: Disk) -> None:
    """Commit a stream's batches; plan, stage, judge, publish and announce a run."""
    done = disk.done
    control = Control.of(lake, SUM.name)
    # The writing process is gone, as after a power cut.
    epoch = control.reserve(replace(Owner.this_process(), started_seconds=-1.0))
    done("lease")
    writer = TableWriter.open(lake / SUM.live_table, SCHEMA, "slice", epoch=epoch)
    for batch in range(BATCHES):
        commit(writer, batch)
        done(f"batch {batch}")
    control.end(epoch, Receipt(time=time.time(), clean=True, cause="drained"))
    done("receipt")
    folder, ledger = RunFolder.of(PipelineLake(lake, SUM), RUN), Ledger.open(lake, SUM)
    folder.begin(PLAN)
    done("plan")
    ledger.append([PLAN.line(PLAN.work[0], State.RECOMPUTING, at_ms=1)])
    done("recomputing")
    own = Try.begin(folder.path, PLAN.names)
    publication = finals.staged(own.stage, finals.FIRST, 1)
    own.write_result(
        {name: StagedSlice(rows=count, files=files) for name, (count, files) in own.staged_rows(1).items()}
    )
    folder.keep_staged(own.result())
    done("staged")
    Incidents.of(lake).open("a.key", "something")
    done("incident")
    final = FinalTable.open(lake, SUM)
    with final.staged() as stage:
        final.publish([publication, finals.staged(stage, BESIDE, 1)])
    done("published")
    final.fold(lambda: None, now_ms=finals.FIRST.end_ms + 3 * HOUR_MS)
    done("folded")
    ledger.append([PLAN.line(PLAN.work[0], State.FINAL, at_ms=2)])
    done("told")


def judge(lake: Path, reported: Sequence[str]) -> None:
    """Everything reported is there and whole, and the work goes on."""
    control = Control.of(lake, SUM.name)
    judge_stream(lake, control, reported)
    assert ("receipt" not in reported) or control.newest_epoch().receipt is not None  # type: ignore[union-attr]
    slices_left(PipelineLake(lake, SUM))
    folder = RunFolder.of(PipelineLake(lake, SUM), RUN)
    if "plan" in reported:
        assert folder.plan() == PLAN
    else:
        with suppress(Refusal):
            assert folder.plan() == PLAN
    staged = folder.staged()
    assert staged is not None or "staged" not in reported
    for slice_ in staged or ():
        assert sum(pq.ParquetFile(file).metadata.num_rows for file in folder.files_by_slice()(slice_)) == 1
    incidents = [incident.key for incident in Incidents.of(lake).all()]
    assert "a.key" in incidents or "incident" not in reported
    judge_tables(lake, reported)


def judge_stream(lake: Path, control: Control, reported: Sequence[str]) -> None:
    assert control.newest() == 1 or "lease" not in reported
    control.history()
    control.reset_failures("an operator")
    judge_rows(lake / SUM.live_table, control.newest(), reported)


def judge_rows(path: Path, epoch: int, reported: Sequence[str]) -> TableWriter:
    """Start as a driver does: each reported batch is there once, and the next ones are, too."""
    note = last_note(path, mends=True)
    writer = TableWriter.open(path, SCHEMA, "slice", epoch=epoch)
    batch = note.batch if note and note.batch is not None else -1
    assert batch >= sum(what.startswith("batch") for what in reported) - 1
    assert rows(path) == list(range(batch + 1))
    for next_ in (batch + 1, batch + 2):
        commit(writer, next_)
    assert rows(path) == list(range(batch + 3))
    return writer


def judge_tables(lake: Path, reported: Sequence[str]) -> None:
    # Read before writing, as a plan does.
    Planner(lake=PipelineLake(lake, SUM), client=None, clock=lambda: 0)._read()  # type: ignore[arg-type]
    ledger, final = Ledger.open(lake, SUM), FinalTable.open(lake, SUM)
    line = ledger.newest([finals.FIRST.name]).get(finals.FIRST.name)
    wanted = {"recomputing": State.RECOMPUTING, "told": State.FINAL}
    for what, state in wanted.items():
        assert what not in reported or (line is not None and line.state in (state, State.FINAL))
    for name in (finals.FIRST.name, BESIDE.name):
        header = final.headers().get(name)
        assert header is not None or "published" not in reported
        assert final.rows(name).num_rows == (header.rows if header else 0)
    final.fold(lambda: None, now_ms=finals.FIRST.end_ms + 3 * HOUR_MS)
    there = [value_of(file) for file in files_with_sizes(DeltaTable(str(final.path)))]
    assert sum(value.startswith(ROWS_SLICE) for value in there) == len(there) / 2
    for table in (SUM.final_table, SUM.ledger_table):
        for file in files_with_sizes(DeltaTable(str(lake / table))):
            pq.ParquetFile(lake / table / file)
    ledger.append([PLAN.line(PLAN.work[0], State.REOPENED, at_ms=3)])


@WAYS
def test_nothing_that_was_reported_is_lost_and_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    monkeypatch.setitem(tables._PROPERTIES, "delta.checkpointInterval", "2")
    assert judge_cuts(tmp_path, way, work, judge) > 80


def test_the_judge_objects_where_nothing_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(tmp_path / "disk") as disk:
        monkeypatch.setattr(os, "fsync", lambda _: None)
        work(tmp_path / "disk" / "lake", disk)
    cut = disk.cuts[-1]
    cut.leave_what_was_durable(tmp_path / "left")
    with pytest.raises(AssertionError):
        judge(tmp_path / "left" / "lake", cut.reported)
