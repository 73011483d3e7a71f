"""Old files beside the tables are removed after their time, and no other files."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs.control import incidents as incidents_module
from jobs.control import writing as writing_module
from jobs.control.epochs import Receipt
from jobs.control.folder import Control
from jobs.control.incidents import Incidents
from jobs.finality.run.folder import RunFolder, slices_left
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines import PIPELINES
from jobs.pipelines.layout import INCIDENTS
from jobs.settings import KeptDays
from jobs.storage.documents import Documents
from jobs.storage.folders import _beside
from jobs.upkeep import old_files as upkeep
from jobs.upkeep.old_files import look_after
from tests.lake.delta.test_freeing import with_replaced_files
from tests.lake.test_final import plan_of, work_of
from tests.lake.test_stream_tables import commit, opened, rows

SUM = PIPELINES["rolling_sum"]
DAYS = 24 * 3600.0
KEPT = KeptDays(incidents=90, logs=7)


def removed(lake: Path) -> dict[str, tuple[int, int]]:
    """The number of removed files and bytes, for each kind with removed files."""
    return {each.what: (each.files, each.bytes) for each in look_after(lake, KEPT) if each.files}


def plant(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("ten bytes.")


def after(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """Set the clock so many days ahead, since the time of a file's move cannot be set back."""
    moment = time.time() + days * DAYS
    for module in (upkeep, incidents_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: moment))


def test_of_an_empty_lake_nothing_is_removed(tmp_path: Path) -> None:
    assert removed(tmp_path / "nowhere") == {}


def test_what_was_put_aside_goes_after_a_month_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside = [
        tmp_path / "checkpoints" / "_aside" / "ingest-numbers-20260101" / "offsets" / "7",
        tmp_path / "checkpoints" / "ingest" / "numbers" / "_aside" / "offsets-7-a",
        tmp_path / "checkpoints" / "word_count" / "_aside" / "commits-7-a",
        tmp_path / "live" / "word_count" / "_aside" / "00000000000000000007.json-a",
    ]
    stay = [
        tmp_path / "live" / "word_count" / "slice=a" / "a.parquet",
        tmp_path / "checkpoints" / "a" / "offsets" / "7",
    ]
    plant(*aside, *stay)
    os.utime(aside[-1], (0, 0))
    after(monkeypatch, 29)
    assert removed(tmp_path) == {}
    after(monkeypatch, 31)
    assert removed(tmp_path) == {"files that were put aside": (4, 40)}
    assert removed(tmp_path) == {}
    assert all(file.is_file() for file in stay)


def test_half_written_files_of_killed_processes_go_after_a_day_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, documents, some = tmp_path / "live" / "rolling_sum", tmp_path / "control" / "ingest", "0123abcd" * 4
    commit(opened(table), 0)
    log = table / "_delta_log"
    half_written = [
        _beside(documents / "receipt-7"),
        tmp_path / "control" / "_incidents" / f".disk.lake.full-000001.{some}",
        tmp_path / "control" / f"._spare.{some}",
        table / f"._freed.json.{some}",
        log / "_commit_3f1c52a0-9d36-4a41-8a2f-0d1c5b7e9f10.json.tmp",
        log / f"{9:020}.json#1",
        log / f"{9:020}.checkpoint.parquet#2",
        log / "_last_checkpoint#1",
    ]
    stay = [
        documents / "receipt-7",
        documents / ".receipt-7",
        documents / f"receipt-7.{some}",
        documents / f".receipt-7.{some}0",
        documents / f".receipt-7.{some[1:]}G",
        log / "_commit_3f1c.json",
        log / "notes.json#1",
        table / "slice=a" / f".part-0.parquet.{some}",
        table / "_staging" / "run" / f".plan.json.{some}",
        tmp_path / f".notes.{some}",
    ]
    young = documents / f".young.{some}"
    plant(*half_written, *stay, young)
    in_half_a_day = time.time() + 0.5 * DAYS
    os.utime(young, (in_half_a_day, in_half_a_day))
    folder, link = documents / f".folder.{some}", documents / f".link.{some}"
    folder.mkdir()
    link.symlink_to(documents / "receipt-7")
    after(monkeypatch, 0.9)
    assert removed(tmp_path) == {}
    after(monkeypatch, 1.1)
    assert removed(tmp_path) == {"half-written files of killed processes": (8, 80)}
    assert not any(file.exists() for file in half_written)
    assert all(each.exists() for each in (*stay, young, folder, link))
    assert rows(table) == [0]


def test_files_that_no_reader_needs_go_though_their_table_is_not_written_any_more(tmp_path: Path) -> None:
    path = tmp_path / "live" / "rolling_sum"
    with_replaced_files(path)
    files, bytes_ = removed(tmp_path)["files of tables that no reader needs"]
    assert files == 5
    assert bytes_ > 0
    assert rows(path) == list(range(5))
    assert removed(tmp_path) == {}


def test_copies_of_unreadable_documents_go_with_the_incidents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = Documents.at(tmp_path / "control" / "ingest")
    documents.create("torn", {})
    (tmp_path / "control" / "ingest" / "torn").write_text("")
    assert documents.read("torn") is None
    after(monkeypatch, 89)
    assert removed(tmp_path) == {}
    after(monkeypatch, 91)
    assert removed(tmp_path) == {"copies of unreadable documents": (1, 0)}


def test_incidents_go_and_so_do_pages_of_what_runs_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    incidents = Incidents.of(tmp_path)
    incidents.open("check.gone.served", "a key is null")
    incidents.close("check.gone.served", "it passes")
    incidents.settle(incidents.unsent()[0], ())
    plant(tmp_path / "quality" / "check_gone" / "r-1.html")
    after(monkeypatch, 6)
    assert removed(tmp_path) == {}
    after(monkeypatch, 8)
    assert removed(tmp_path) == {"pages about audits and checks": (1, 10)}
    after(monkeypatch, 91)
    assert removed(tmp_path) == {"incidents": (3, 0)}
    assert not list((tmp_path / INCIDENTS).iterdir())


def test_run_folders_go_when_nobody_plans(tmp_path: Path) -> None:
    folder = RunFolder.of(PipelineLake(tmp_path, SUM), "r")
    folder.path.mkdir(parents=True)
    folder.end()
    plant(folder.path / "windows-1" / "slice=a" / "a.parquet")
    assert removed(tmp_path) == {}
    os.utime(folder.path / "ended.json", (0, 0))
    assert removed(tmp_path) == {"run folders": (2, 12)}
    assert not folder.path.exists()


def test_the_folder_of_a_run_that_died_stays_until_a_plan_has_seen_it(tmp_path: Path) -> None:
    """While no plan runs, only this folder shows that an old slice was to be published again."""
    folder = RunFolder.of(PipelineLake(tmp_path, SUM), "died")
    folder.begin(plan_of("died", work_of("20200101T000000Z")))
    os.utime(folder.path / "plan.json", (1, 1))
    assert removed(tmp_path) == {}
    assert slices_left(PipelineLake(tmp_path, SUM)) == {"20200101T000000Z"}


def test_whose_lease_is_held_is_left_to_the_next_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.of(PipelineLake(tmp_path, SUM), "r")
    folder.path.mkdir(parents=True)
    folder.end()
    os.utime(folder.path / "ended.json", (0, 0))
    monkeypatch.setattr(writing_module, "LEASE_PATIENCE_SECONDS", 0.0)
    with writing_module.writing(tmp_path, SUM.recompute_job):
        assert removed(tmp_path) == {}
    assert folder.path.exists()
    assert removed(tmp_path) == {"run folders": (1, 2)}


def test_one_that_has_lost_its_lease_removes_no_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was suspended while it looked at the sizes of files. A plan may begin a run in such a folder again."""
    folder = RunFolder.of(PipelineLake(tmp_path, SUM), "r")
    folder.path.mkdir(parents=True)
    folder.end()
    os.utime(folder.path / "ended.json", (0, 0))

    def overtaken(_: Path) -> list[int]:
        control = Control.of(tmp_path, SUM.recompute_job)
        control.end(control.newest(), Receipt(time=time.time(), clean=False, cause="it slept"))
        return [2]

    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "_sizes", overtaken)
        assert removed(tmp_path) == {}
    assert folder.has_ended
    assert removed(tmp_path) == {"run folders": (1, 2)}


def test_a_plan_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    folder = RunFolder.of(PipelineLake(tmp_path, SUM), "r")
    folder.path.mkdir(parents=True)
    (folder.path / "plan.json").write_text("")
    assert removed(tmp_path) == {}
    assert [incident.closed for incident in Incidents.of(tmp_path).all()] == [True]
