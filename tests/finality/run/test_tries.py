"""Tries of a run: the task takes only the report of its own try, and a job of an older try ends itself."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from jobs.finality.run import tries
from jobs.finality.run.folder import RunFolder
from jobs.finality.run.tries import TASK_VARIABLE, StagedSlice, Try, describe_process
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines import PIPELINES
from jobs.refusal import Refusal
from jobs.storage.parquet import write
from tests import processes
from tests.lake.test_final import plan_of, work_of

SUM = PIPELINES["rolling_sum"]
SLICE = "20261119T000000Z"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.of(PipelineLake(tmp_path, SUM), "r")
    made.begin(plan_of("r", work_of(SLICE)))
    return made


def staged(own: Try, rows: int) -> dict[str, StagedSlice]:
    """Write this number of rows as a job does; the job's report about them."""
    write(pa.table({"number": list(range(rows))}), own.stage / f"slice={SLICE}" / "0.parquet")
    ((name, (count, files)),) = own.staged_rows(rows).items()
    return {name: StagedSlice(read=rows, expected=rows, rows=count, files=files)}


def test_the_result_of_an_orphan_is_not_taken(folder: RunFolder) -> None:
    orphan = Try.begin(folder.path, [SLICE])
    folder.begin(folder.plan())
    own = Try.begin(folder.path, [SLICE])
    own.write_result(staged(own, 3))
    # Before the task takes the report of its own try, and after it.
    orphan.write_result(staged(orphan, 1))
    folder.keep_staged(own.result())
    orphan.write_result({})
    assert (folder.staged() or {})[SLICE].rows == 3
    assert [file.parts[-3] for file in map(Path, map(str, folder.files_by_slice()(SLICE)))] == [f"windows-{own.name}"]
    assert not orphan.is_under_way


def test_a_result_must_have_all_rows_that_were_written(folder: RunFolder) -> None:
    own = Try.begin(folder.path, [SLICE])
    write(pa.table({"number": [1, 2]}), own.stage / f"slice={SLICE}" / "0.parquet")
    with pytest.raises(Refusal, match=r"3 rows were written into .*, but 2 are there"):
        own.staged_rows(3)
    with pytest.raises(Refusal, match="has no result"):
        own.result()


def test_a_try_that_is_over_stages_nothing(folder: RunFolder) -> None:
    own = Try.begin(folder.path, [SLICE])
    assert own.slices() == [SLICE]
    folder.begin(folder.plan())
    with pytest.raises(Refusal, match="has ended: its run was planned again"):
        own.slices()


_JOB = """
import sys, time
from pathlib import Path
from jobs.finality.run.tries import Try, stop_when_task_ends
own = Try(run=Path(sys.argv[1]), name=sys.argv[2]) if len(sys.argv) > 1 else None
with stop_when_task_ends(own):
    print("at work", flush=True)
    time.sleep(60)
"""


# The command of a driver, whose work takes long.
_COMMAND = """
import sys, time
from contextlib import nullcontext
from jobs import session
from jobs.cli import drivers
from jobs.finality import account, auditing

def work(*_, **__):
    print("at work", flush=True)
    time.sleep(60)

session.opened = lambda *_: nullcontext()
account.run = auditing.examine = work
# The audit asks no broker if the task tells it the time.
more = {"now_ms": 0} if sys.argv[1] == "audit" else {}
getattr(drivers, sys.argv[1])("rolling_sum", run="r", link=None, **more)
"""


def at_work(script: str, *arguments: str, **env: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", script, *arguments]
    job = subprocess.Popen(
        command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "at work\n"
    return job


@pytest.mark.parametrize(
    "arguments", [(_JOB,), (_COMMAND, "audit"), (_COMMAND, "account")], ids=["try", "audit", "account"]
)
def test_a_job_whose_task_is_killed_ends_itself(arguments: tuple[str, ...], tmp_path: Path) -> None:
    words = "from jobs.finality.run.tries import describe_process; print(describe_process(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as task:
        assert task.stdout is not None
        env = {TASK_VARIABLE: task.stdout.readline().strip(), "LAKE_ROOT": str(tmp_path)}
        with at_work(*arguments, **env) as job:
            assert job.poll() is None
            task.kill()
            task.wait()
            processes.wait_until(lambda: job.poll() is not None, "the end of a job without a task")
            assert job.returncode == -signal.SIGKILL
            assert "has died: this job ends now" in (job.stderr.read() if job.stderr else "")


def test_a_job_whose_run_is_begun_anew_ends_itself(folder: RunFolder) -> None:
    own = Try.begin(folder.path, [SLICE])
    with at_work(_JOB, str(folder.path), own.name) as job:
        assert job.poll() is None
        folder.begin(folder.plan())
        processes.wait_until(lambda: job.poll() is not None, "the end of a try that is over")
        assert "was planned again" in (job.stderr.read() if job.stderr else "")


def test_rows_that_an_earlier_version_has_staged_can_still_be_published(folder: RunFolder) -> None:
    """A slice that was blocked under the old version may be approved now."""
    write(pa.table({"number": [1]}), folder.path / "windows-a1" / f"slice={SLICE}" / "0.parquet")
    (folder.path / "staged.json").write_text('{"events_read": {}, "windows": "windows-a1"}')
    assert [file.name for file in folder.files_by_slice()(SLICE)] == ["0.parquet"]
    assert folder.staged() is None


def test_a_clock_that_is_set_anew_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    words, boot_time = describe_process(), psutil.boot_time()
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time + 3600)
    monkeypatch.setattr(psutil.Process, "create_time", _shifted(psutil.Process.create_time))
    assert tries._stop_reason(words, None) is None


def _shifted(create_time: Callable[[psutil.Process], float]) -> Callable[[psutil.Process], float]:
    return lambda process: create_time(process) + 3600
