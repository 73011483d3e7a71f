"""Operators give each driver a temporary folder of its own. The folder goes when the driver has ended or was killed."""

import os
import sys
from pathlib import Path

import pytest

from jobs.scratch import Scratch
from tideline_airflow.operators import batch, streaming
from tideline_airflow.operators.batch import BatchJobOperator, DriverError
from tideline_airflow.submission import submission

# Only a driver that has inherited the lock can ask about it.
_KILLED = "import os, signal; os.fstat({lock}); os.kill(os.getpid(), signal.SIGKILL)"
_RUNS = "import time; time.sleep(60)"


class Drivers:
    """Stands for `spark-submit`: it starts a Python process, and remembers the folders of the drivers."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.folders: list[Path] = []

    def __call__(self, _: object, scratch: Scratch, *, brief: bool = False) -> tuple[list[str], dict[str, str]]:
        (scratch.folder / "blockmgr-1").mkdir()
        self.folders.append(scratch.folder)
        return [sys.executable, "-c", self.code.format(lock=scratch.lock)], dict(os.environ)

    @property
    def there(self) -> list[bool]:
        return [folder.exists() for folder in self.folders]


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_SCRATCH", str(tmp_path / "scratch"))


def test_a_batch_driver_that_was_killed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drivers = Drivers(_KILLED)
    monkeypatch.setattr(batch, "submission", drivers)
    with pytest.raises(DriverError, match="ended with exit code -9"):
        BatchJobOperator(task_id="t", pipeline="rolling_sum").submit("account", "rolling_sum")
    assert drivers.there == [False]


def test_a_streams_driver_keeps_its_folder_until_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drivers = Drivers(_RUNS)
    monkeypatch.setattr(streaming, "submission", drivers)
    operator = streaming.StreamingJobOperator(task_id="run", job="ingest")
    with operator._submit(1, tmp_path / "1.log") as first:
        assert drivers.there == [True], "the task ends now, and the driver goes on"
        with operator._submit(2, tmp_path / "2.log") as second:
            assert drivers.there == [True, True]
            second.kill()
        with operator._submit(3, tmp_path / "3.log") as third:
            assert drivers.there == [True, False, True]
            third.kill()
        first.kill()


def test_java_learns_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spark").mkdir()
    (tmp_path / "spark" / "a.jar").touch()
    monkeypatch.setenv("TIDELINE_JARS", str(tmp_path))
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", '{"conn_type": "spark", "host": "local[1]"}')
    monkeypatch.setenv("AIRFLOW_CONN_TIDELINE_KAFKA", '{"conn_type": "tideline_kafka", "host": "broker:9092"}')
    for brief in (True, False):
        command, _ = submission(["ingest"], Scratch(folder=Path("/my scratch/1"), lock=0), brief=brief)
        (options,) = [word for word in command if word.startswith("spark.driver.extraJavaOptions=")]
        assert ' "-Djava.io.tmpdir=/my scratch/1"' in options
        assert options.endswith(" -XX:TieredStopAtLevel=1") is brief
