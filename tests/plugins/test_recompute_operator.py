"""The task that computes a run's slices, with real Spark in this process. A slice that fails alone stops no other."""

import os
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from jobs.finality import recompute
from jobs.finality.run.folder import RunFolder
from jobs.finality.run.tries import StagedSlice
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines import PIPELINES
from jobs.settings import Settings
from tests.lake.test_events import event, land
from tests.lake.test_final import plan_of, work_of
from tideline_airflow.operators import batch
from tideline_airflow.operators.batch import DriverError
from tideline_airflow.operators.recompute import RecomputeOperator

pytestmark = pytest.mark.spark

SUM = PIPELINES["rolling_sum"]
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
# A slice an hour: the events of each lie in a file of their own.
NAMES = [f"20260131T{hour}0000Z" for hour in (12, 13, 14, 15)]
EMPTY = "20260131T160000Z"


class Run:
    """A planned run on four slices with one event each and one empty slice, and the tries of its task."""

    def __init__(self, lake: Path, spark: SparkSession) -> None:
        files = []
        for hour in range(4):
            moment = NOON + timedelta(hours=hour)
            at = {"event_time": moment, "arrival_time": moment, "hour": f"{moment:%Y-%m-%dT%H}"}
            files.append([{**event(0, hour), **at}])
        land(lake, *files)
        self.lake, self.folder = lake, RunFolder.of(PipelineLake(lake, SUM), "r")
        works = [work_of(name) for name in NAMES] + [replace(work_of(EMPTY, events=0), window_events=0)]
        self.folder.begin(replace(plan_of("r", *works), fingerprint=SUM.fingerprint))
        self.submitted: list[int] = []

    def damage(self, hour: int) -> None:
        """Make the events of a slice unreadable."""
        (file,) = (self.lake / "events" / "numbers" / f"hour=2026-01-31T{hour}").glob("*.parquet")
        file.write_bytes(file.read_bytes()[:-100])

    def try_(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """One try of three. The job runs in this process; as with `spark-submit`, a failure in Spark is no refusal."""
        operator = RecomputeOperator(task_id="recompute", pipeline=SUM.name)
        settings = replace(Settings.from_env({}), lake_root=self.lake)

        def submit(*words: str, events: int) -> None:
            self.submitted.append(events)
            assert words[:4] == ("recompute", SUM.name, "--run", "r")
            try:
                recompute.run(PipelineLake(settings.lake_root, SUM), settings, "r", words[5])
            except (PySparkException, Py4JJavaError) as error:
                raise DriverError(f"the driver ended: {str(error)[:40]}") from error

        monkeypatch.setattr(operator, "submit", submit)
        monkeypatch.setattr(operator, "settings", lambda: settings)
        monkeypatch.setattr(operator, "lake", lambda: PipelineLake(self.lake, SUM))
        task = SimpleNamespace(try_number=number, max_tries=2)
        context: Any = {"dag_run": SimpleNamespace(run_id="r"), "ti": task}
        operator.execute(context)

    def staged(self) -> dict[str, int]:
        """The number of rows of each slice that was taken into the run."""
        return {name: slice_.rows for name, slice_ in (self.folder.staged() or {}).items()}


@pytest.fixture
def run(tmp_path: Path, spark: SparkSession) -> Run:
    return Run(tmp_path, spark)


def test_all_slices_are_computed_in_one_job(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.try_(1, monkeypatch)
    assert run.staged() == {**dict.fromkeys(NAMES, 1), EMPTY: 0}
    assert run.submitted == [4]
    assert (run.folder.staged() or {})[NAMES[0]] == StagedSlice(
        read=1,
        expected=1,
        rows=1,
        files=tuple(str(f.relative_to(run.folder.path)) for f in run.folder.files_by_slice()(NAMES[0])),
    )


def test_a_slice_that_fails_alone_is_found_in_the_last_try(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.damage(14)
    for number in (1, 2):
        with pytest.raises(DriverError):
            run.try_(number, monkeypatch)
        assert run.folder.staged() is None, "what fails for a moment is tried again as a whole"
    run.submitted.clear()
    run.try_(3, monkeypatch)
    assert run.staged() == {NAMES[0]: 1, NAMES[1]: 1, NAMES[3]: 1, EMPTY: 0}
    assert list(run.folder.failed()) == [NAMES[2]]
    assert "the driver ended" in run.folder.failed()[NAMES[2]]
    assert run.submitted == [4, 2, 2, 1, 1]
    assert len(run.folder.stages()) == 2


def test_a_damaged_file_with_the_events_of_the_first_slices_keeps_nothing_else_back(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hour in (12, 13):
        run.damage(hour)
    run.try_(3, monkeypatch)
    assert run.staged() == {NAMES[2]: 1, NAMES[3]: 1, EMPTY: 0}
    assert list(run.folder.failed()) == NAMES[:2]


def test_a_task_that_is_ended_starts_no_other_driver(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    command = [sys.executable, "-c", "import time; print('at work', flush=True); time.sleep(60)"]
    monkeypatch.setattr(batch, "submission", lambda *_, **__: (command, dict(os.environ)))
    operator = RecomputeOperator(task_id="recompute", pipeline=SUM.name)
    settings = replace(Settings.from_env({}), lake_root=run.lake)
    monkeypatch.setattr(operator, "settings", lambda: settings)
    monkeypatch.setattr(operator, "lake", lambda: PipelineLake(run.lake, SUM))
    started = list[int]()
    say = operator._log_output

    def ended_at_once(process: Any) -> Any:
        started.append(process.pid)
        operator.on_kill()
        return say(process)

    monkeypatch.setattr(operator, "_log_output", ended_at_once)
    context: Any = {"dag_run": SimpleNamespace(run_id="r"), "ti": SimpleNamespace(try_number=3, max_tries=2)}
    with pytest.raises(AirflowFailException, match="the task was ended, and its driver with it"):
        operator.execute(context)
    assert len(started) == 1


def test_a_cause_that_is_none_of_the_slices_blames_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for hour in (12, 13, 14, 15):
        run.damage(hour)
    with pytest.raises(DriverError):
        run.try_(3, monkeypatch)
    assert run.folder.staged() is None
