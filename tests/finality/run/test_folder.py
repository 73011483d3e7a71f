"""The folder of a run: what its tasks hand to each other."""

from dataclasses import replace
from pathlib import Path

from jobs.finality.run.folder import RunFolder
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
