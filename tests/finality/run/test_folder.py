"""The folder of a run: what its tasks hand to each other."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.finality.run import folder as module
from jobs.finality.run.folder import ENDED_KEPT_SECONDS, RunFolder, discard_old, slices_left
from jobs.lake.pipeline_lake import PipelineLake
from tests.lake.test_final import FIRST, SUM, plan_of, work_of


def test_a_plan_that_an_earlier_version_has_written_is_read(tmp_path: Path) -> None:
    folder, plan = RunFolder.of(PipelineLake(tmp_path, SUM), "r"), plan_of("r", work_of(FIRST.name))
    plan = replace(plan, unannounced=(FIRST.name,))
    folder.begin(plan)
    assert folder.plan() == plan
    file = folder.path / "plan.json"
    file.write_text(file.read_text().replace('"unannounced"', '"untold"'))
    assert folder.plan() == plan


def test_an_ended_run_that_is_half_removed_leaves_no_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed after it has removed the first documents of the folder."""
    lake = PipelineLake(tmp_path, SUM)
    folder = RunFolder.of(lake, "r")
    folder.begin(plan_of("r", work_of(FIRST.name)))
    folder.end()
    ended = folder.path / "ended.json"
    os.utime(ended, (time.time() - 2 * ENDED_KEPT_SECONDS,) * 2)

    def killed(path: Path) -> Any:
        (path / "ended.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "remove", killed)
    with pytest.raises(KeyboardInterrupt):
        discard_old(lake, and_abandoned=True)
    assert folder.path.is_dir()
    assert slices_left(lake) == set()
