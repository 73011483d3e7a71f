"""Each driver has a temporary folder, which is removed when the driver has certainly ended, and not before."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs import session
from jobs.refusal import Refusal
from jobs.scratch import Scratch, new_scratch, take_scratch
from jobs.settings import Settings

# As `spark-submit` starts Java: two scripts, each replaced by the next process. Java hands nothing on to Python.
_SCRIPTS = """exec bash -c 'exec "$0" -c "$1"' "$0" "$1" """
_DRIVER = """
import subprocess, sys
print("runs", flush=True)
subprocess.run([sys.executable, "-c", "import sys; sys.stdin.read()"])
"""


@contextmanager
def driver(root: Path) -> Iterator[tuple[Scratch, "subprocess.Popen[str]"]]:
    """A driver whose launcher has ended."""
    with new_scratch(root) as scratch:
        command = ("bash", "-c", _SCRIPTS, sys.executable, _DRIVER)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, pass_fds=[scratch.lock], start_new_session=True, **pipes)
    with process:
        assert process.stdout
        assert process.stdout.readline() == "runs\n"
        (scratch.folder / "spark-1").mkdir()
        try:
            yield scratch, process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def folders(root: Path) -> list[Path]:
    return sorted(each for each in root.glob("*/*") if each.is_dir())


def test_the_folder_of_a_killed_driver_goes_and_that_of_a_running_one_stays(tmp_path: Path) -> None:
    with driver(tmp_path) as (first, process), driver(tmp_path) as (second, _):
        assert folders(tmp_path) == sorted((first.folder, second.folder))
        assert (first.folder / "spark-1").is_dir()
        process.kill()
        process.wait()
        assert first.folder.exists(), "nothing has started since"
        with new_scratch(tmp_path) as third:
            assert folders(tmp_path) == sorted((second.folder, third.folder))
            assert (second.folder / "spark-1").is_dir()
        assert folders(tmp_path) == [second.folder], "no driver had the third"


def test_folders_of_other_machines_are_left_alone(tmp_path: Path) -> None:
    """On a shared disk their locks may not be visible here."""
    ended, theirs = tmp_path / socket.gethostname() / "driver-1", tmp_path / "another-host" / "driver-1"
    for folder in (ended, theirs):
        folder.mkdir(parents=True)
    with new_scratch(tmp_path):
        assert (ended.exists(), theirs.exists()) == (False, True)


def test_many_that_start_at_once_remove_no_folder_of_each_other(tmp_path: Path) -> None:
    def starts(_: int) -> bool:
        with new_scratch(tmp_path) as scratch:
            (scratch.folder / "file").touch()
            return os.stat(scratch.lock).st_nlink == 1

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(starts, range(400)))
    assert folders(tmp_path) == []


def test_a_place_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refusal, match=r"SPARK_SCRATCH='.*/file' cannot be used .*\(Not a directory\): set it to a"):
        take_scratch(tmp_path / "file")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    jars = tmp_path / "jars" / "spark"
    jars.mkdir(parents=True)
    (jars / "a.jar").touch()
    return Settings.from_env({"TIDELINE_JARS": str(jars.parent), "SPARK_SCRATCH": str(tmp_path / "my scratch")})


def test_a_driver_that_is_started_by_hand_keeps_one_folder_until_it_ends(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    first, again = session._conf(settings), session._conf(settings)
    assert first == again
    (folder,) = folders(settings.scratch)
    assert f' "-Djava.io.tmpdir={folder}"' in first["spark.driver.extraJavaOptions"]
    with new_scratch(settings.scratch):
        assert folder.exists()


def test_below_spark_submit_no_further_folder_is_made(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert "java.io.tmpdir" not in session._conf(settings)["spark.driver.extraJavaOptions"]
    assert not settings.scratch.exists()
