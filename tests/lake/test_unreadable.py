"""Final rows that cannot be read any more: only their slices wait for a person."""

import errno
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.control.writing import writing
from jobs.finality import publishing
from jobs.finality.run.folder import RunFolder, slices_left
from jobs.finality.run.tries import StagedSlice
from jobs.lake import final as final_module
from jobs.lake.delta.reading import value_of
from jobs.lake.final import FinalTable
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.slices import Header
from jobs.pipelines.layout import HOUR_MS, ROWS_SLICE
from jobs.pipelines.slices import Slice, slices_between
from jobs.settings import Settings
from tests.lake.test_final import plan_of, work_of
from tests.lake.test_folding import AN_HOUR, DAYS_LATER, HOURS_LATER, SUM, T0, folders, never, publish, staged

NEXT_HOUR = slices_between(SUM, T0 + HOUR_MS, T0 + 2 * HOUR_MS)


def folded_file(table: FinalTable) -> Path:
    (file,) = (file for file in table.path.glob("*/*.parquet") if value_of(str(file)).startswith(ROWS_SLICE))
    return file


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def spoil_a_measure(file: Path) -> None:
    """Make a measure unreadable; the windows can still be read."""
    group = pq.read_metadata(file).row_group(0)
    columns = {group.column(index).path_in_schema: group.column(index) for index in range(group.num_columns)}
    column, content = columns["total"], bytearray(file.read_bytes())
    start = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    file.write_bytes(content)


def commit(lake: Path, versions: Sequence[tuple[Slice, int]], run: str = "again") -> dict[str, str]:
    """Do the part of a publish before its messages. Return why slices were refused."""
    folder, headers = stage(lake, versions, run)
    with writing(lake, SUM.recompute_job) as lease:
        taken, unreadable = publishing._commit(
            PipelineLake(lake, SUM), FinalTable.open(lake, SUM), lease, folder, headers
        )
    assert taken == {}
    return unreadable


def stage(lake: Path, versions: Sequence[tuple[Slice, int]], run: str) -> tuple[RunFolder, dict[str, Header]]:
    folder = RunFolder.of(PipelineLake(lake, SUM), run)
    folder.begin(plan_of(run, *(replace(work_of(slice_.name), version=version - 1) for slice_, version in versions)))
    publications = [staged(folder.path / "try", slice_, version, SUM, 1) for slice_, version in versions]
    files = [tuple(str(file.relative_to(folder.path)) for file in each.files) for each in publications]
    names = [slice_.name for slice_, _ in versions]
    folder.keep_staged({name: StagedSlice(rows=1, files=each) for name, each in zip(names, files, strict=True)})
    return folder, {each.header.slice: replace(each.header, run=run) for each in publications}


def versions(lake: Path) -> dict[str, int]:
    return {name: header.version for name, header in FinalTable.open(lake, SUM).headers().items()}


@pytest.mark.parametrize("harm", [cut_off, spoil_a_measure, Path.unlink])
def test_a_slice_whose_rows_cannot_be_read_keeps_no_other_slice_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None]
) -> None:
    """All slices of the run are adjacent, so they would be one commit."""
    table = publish(tmp_path, AN_HOUR[:-1])
    table.maintain(never, HOURS_LATER)
    publish(tmp_path, NEXT_HOUR[:1])
    file = folded_file(table)
    content = file.read_bytes()
    harm(file)
    run = [(AN_HOUR[-3], 2), (AN_HOUR[-2], 2), (AN_HOUR[-1], 1), (NEXT_HOUR[0], 2), (NEXT_HOUR[1], 1)]
    broken = [slice_.name for slice_ in AN_HOUR[-3:-1]]
    refused = commit(tmp_path, run)
    assert list(refused) == broken
    assert "cannot be read: restore the file in final/rolling_sum from a backup" in refused[broken[0]]
    assert file.name in refused[broken[0]]
    assert [r.levelno for r in caplog.records if "cannot be read" in r.message][:1] == [logging.ERROR]
    wanted = {slice_.name: version for slice_, version in run}
    found = versions(tmp_path)
    assert {name: found[name] for name in wanted} == wanted | dict.fromkeys(broken, 1)
    # When the file is restored, a later run does the remaining work.
    file.write_bytes(content)
    assert commit(tmp_path, run[:2], "later") == {}
    assert {name: versions(tmp_path)[name] for name in wanted} == wanted
    assert FinalTable.open(tmp_path, SUM).rows(AN_HOUR[0].name).num_rows == 1


def test_a_run_with_such_a_slice_has_not_ended_so_that_a_plan_finds_it(tmp_path: Path) -> None:
    """One such run is enough, however long the file is not restored."""
    table = publish(tmp_path, AN_HOUR[:3])
    table.maintain(never, HOURS_LATER)
    file, name = folded_file(table), AN_HOUR[0].name
    cut_off(file)
    ended = []
    for run in ("first", "second", "third"):
        folder, _ = stage(tmp_path, [(AN_HOUR[0], 2)], run)
        folder.keep_verdicts({name: {"passed": True, "checksum": "c", "rows": 1, "failures": []}})
        settings = replace(Settings.from_env({}), lake_root=tmp_path)
        published = publishing.publish(PipelineLake(settings.lake_root, SUM), settings.kafka, run, now_ms=DAYS_LATER)
        assert (list(published.refused), published.versions) == ([name], {})
        ended.append(folder.has_ended)
        assert slices_left(PipelineLake(tmp_path, SUM)) == {name}
    assert ended == [False, True, True]


def test_a_full_disk_is_no_fault_of_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = publish(tmp_path, AN_HOUR[:3])
    table.maintain(never, HOURS_LATER)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(final_module, "write_without", full)
    with pytest.raises(OSError, match="no space left"):
        commit(tmp_path, [(AN_HOUR[0], 2)])


def test_what_cannot_be_folded_leaves_the_turn_to_older_days(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each publish is a process of its own, and its time is up after the first fold."""
    day_before = [slice_ for slice_ in slices_between(SUM, T0 - 24 * HOUR_MS, T0 - 23 * HOUR_MS)[:2]]
    table = publish(tmp_path, [*day_before, *AN_HOUR[:2]])
    torn = next((table.path / f"slice={AN_HOUR[0].name}").iterdir())
    content = torn.read_bytes()
    cut_off(torn)
    left = [slice_.name for slice_ in AN_HOUR[:2]]
    for _ in range(3):
        FinalTable.open(tmp_path, SUM).fold(never, DAYS_LATER, seconds=0)
    assert folders(FinalTable.open(tmp_path, SUM)) == [*left, "rows-20261109"]
    assert caplog.text.count("of 20261110 are not folded") == 1
    torn.write_bytes(content)
    FinalTable.open(tmp_path, SUM).fold(never, DAYS_LATER)
    assert set(left) < set(folders(FinalTable.open(tmp_path, SUM)))
    later = time.time() + 25 * 3600
    monkeypatch.setattr(time, "time", lambda: later)
    FinalTable.open(tmp_path, SUM).fold(never, DAYS_LATER)
    assert folders(FinalTable.open(tmp_path, SUM)) == ["rows-20261109", "rows-20261110"]


@pytest.mark.parametrize("said", ["", "[]", '{"file": "long ago"}', '{"file": null}'])
def test_a_note_of_failed_folds_that_cannot_be_read_is_begun_anew(tmp_path: Path, said: str) -> None:
    table = publish(tmp_path, AN_HOUR[:2])
    (table.path / "_not_folded.json").write_text(said)
    cut_off(next((table.path / f"slice={AN_HOUR[0].name}").iterdir()))
    table.fold(never, HOURS_LATER)
    (file,) = json.loads((table.path / "_not_folded.json").read_text())
    assert file.startswith(f"slice={AN_HOUR[0].name}/")
