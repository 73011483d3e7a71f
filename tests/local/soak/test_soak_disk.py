"""What a soak reports about its disk: files, freed space, whether it stays flat, and whether that proves anything."""

import os
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from jobs.refusal import Refusal
from local.soak import report as soak_report
from local.soak.disk import PARTS, Disk, Freed, Use, disk_of, environment_of, freed, look
from local.soak.run import _settings
from tests.local.soak.test_soak import sample, soaked
from tests.small_disk import can_mount

MB = 1_000_000


def use(lake_mb: float, rows_mb: float = 0) -> Use:
    taken = {"lake": lake_mb, "broker": 1, "airflow": 1, "logs": 1}
    sizes = {part: round(size * MB) for part, size in taken.items()}
    return Use(bytes=sizes, files=dict.fromkeys(PARTS, 7), rows_bytes=round(rows_mb * MB))


def disk(*uses: tuple[float, Use], freed_mb: int = 500, quota_mb: int | None = 400) -> Disk:
    return Disk(uses=uses, freed=Freed(bytes=freed_mb * MB, files=9), quota_bytes=quota_mb * MB if quota_mb else None)


@pytest.mark.parametrize(("last", "is_flat"), [(110, True), (112, False)])
def test_the_most_of_the_second_half_is_compared_with_that_of_the_first(last: float, is_flat: bool) -> None:
    uses = ((5, 300), (20, 100), (30, 60), (40, 90), (45, 50), (50, last), (60, 80))
    found = list(disk(*((minute, use(taken)) for minute, taken in uses)).unmet())
    assert (found == []) is is_flat
    if not is_flat:
        assert found == [
            "the lake keeps growing: without the rows of its tables it took up to 100 MB in the first half of the time "
            "since minute 20, and up to 112 MB in the second"
        ]


def test_rows_may_grow() -> None:
    assert list(disk((20, use(100, 20)), (40, use(180, 100)), (60, use(260, 180))).unmet()) == []
    assert len(list(disk((20, use(100, 20)), (40, use(180, 100)), (60, use(260, 120))).unmet())) == 1


def test_what_would_have_fitted_anyway_shows_nothing() -> None:
    (found,) = disk((20, use(90)), (60, use(90)), freed_mb=300).unmet()
    assert found.startswith("without upkeep the lake would take 390 MB, which fits into the quota of 400 MB")


def test_without_a_quota_it_is_only_shown() -> None:
    seen = disk((20, use(90)), (60, use(190)), freed_mb=0, quota_mb=None)
    assert list(seen.unmet()) == []
    assert "quota" not in " ".join(seen.sentences())


def test_it_is_a_part_of_the_verdict() -> None:
    found = soaked(sample(1, 100), sample(2, 100), disk=disk((20, use(90)), (60, use(190))))
    assert any("the lake keeps growing" in sentence for sentence in found.unmet())
    said = "\n".join(soak_report.verdict(found))
    assert "disk at the end: lake 190 MB in 7 files, broker 1 MB in 7 files" in said
    assert "deleted by the writers of tables: 500 MB in 9 files; without this the lake would take 690 MB" in said
    *_, shown = soak_report.tables(found)
    assert (shown.title, shown.row_count) == ("disk", 2)


def test_what_lies_on_a_disk_is_counted(tmp_path: Path) -> None:
    table = tmp_path / "lake" / "events" / "numbers"
    for number in range(2):
        write_deltalake(table, pa.table({"n": [number]}), mode="overwrite")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_bytes(bytes(100_000))
    found = look(tmp_path, ["events/numbers", "live/not_there"])
    assert found.files == {"lake": 4, "broker": 0, "airflow": 0, "logs": 1}
    assert 100_000 <= found.bytes["logs"] < 110_000
    (live, _) = sorted(table.glob("*.parquet"), key=lambda file: file.stat().st_mtime, reverse=True)
    assert found.rows_bytes == live.stat().st_size
    assert found.besides_bytes == found.bytes["lake"] - live.stat().st_size


def test_what_was_freed_is_read_from_all_logs(tmp_path: Path) -> None:
    log = tmp_path / "tasks" / "drivers" / "ingest"
    log.mkdir(parents=True)
    (log / "1.log").write_text("INFO freed 100 bytes of numbers: 2 files, 0 empty folders, in 0.1 s\nfreed nothing\n")
    (tmp_path / "b.log").write_text("freed 20 bytes of rolling_sum: 1 files, 3 empty folders, in 0.1 s; 5 files wait\n")
    assert freed(tmp_path) == Freed(bytes=120, files=3)


def test_a_small_disk_has_settings_that_the_user_may_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment_of(None) == {}
    assert environment_of(400)["LAKE_RESERVE_MB"] == "20"
    monkeypatch.setenv("LIVE_KEPT_SECONDS", "77")
    assert _settings(tmp_path, environment_of(400)).jobs.live_kept_seconds == 77
    monkeypatch.delenv("LIVE_KEPT_SECONDS")
    assert _settings(tmp_path, environment_of(400)).jobs.live_kept_seconds == 600


@pytest.mark.skipif(not can_mount(), reason="only root can mount a disk")
def test_a_quota_is_a_disk_of_that_size_and_is_gone_afterwards(tmp_path: Path) -> None:
    with disk_of(tmp_path / "lake", 5):
        assert shutil.disk_usage(tmp_path / "lake").total == pytest.approx(5 * MB, rel=0.01)
        assert os.path.ismount(tmp_path / "lake")
    assert not os.path.ismount(tmp_path / "lake")
    with disk_of(tmp_path / "other", None):
        assert not (tmp_path / "other").exists()


def test_who_may_not_mount_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Refusal, match="only root may do"), disk_of(tmp_path / "lake", 5):
        raise AssertionError("it is not begun")
