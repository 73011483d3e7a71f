"""Spark's classes in one file: made once, used by every start, and never in the way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.settings import PROJECT, Settings, class_archive, spark_conf
from local.jars import classes

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

START = """
from dataclasses import replace
from jobs import session
from jobs.settings import Settings
with session.opened(replace(Settings.from_env(), spark_master="local[1]"), "start") as spark:
    assert spark.range(3).count() == 3
"""


@pytest.fixture
def jars(tmp_path: Path) -> Path:
    """The jars of this machine in a folder of its own."""
    (tmp_path / "spark").symlink_to(Settings.from_env({}).jars / "spark")
    return tmp_path


def start(jars: Path, *java_options: str) -> subprocess.CompletedProcess[str]:
    """A driver as a user starts it."""
    env = {**os.environ, "TIDELINE_JARS": str(jars), "SPARK_SUBMIT_OPTS": " ".join(java_options)}
    return subprocess.run(
        [sys.executable, "-c", START], cwd=PROJECT, env=env, capture_output=True, text=True, check=False, timeout=120
    )


def test_a_start_reads_it() -> None:
    """This test uses the file of this machine's jars, since making one takes as long as several starts."""
    jars = Settings.from_env({}).jars
    assert classes.prepare(jars)
    made = class_archive(jars).stat()
    assert classes.prepare(jars)
    assert class_archive(jars).stat().st_mtime_ns == made.st_mtime_ns
    assert not list(jars.glob(".classes-*"))
    started = start(jars, "-Xlog:class+load:stdout")
    assert started.returncode == 0, started.stderr
    assert started.stdout.count("source: shared objects file (top)") > 10_000


def test_one_that_does_not_fit_is_passed_over_without_a_word(jars: Path) -> None:
    class_archive(jars).write_bytes(b"of another Java" * 1000)
    started = start(jars)
    assert started.returncode == 0, started.stderr
    silent = start_without(jars)
    assert (started.stdout, started.stderr) == (silent.stdout, silent.stderr)


def start_without(jars: Path) -> subprocess.CompletedProcess[str]:
    class_archive(jars).unlink()
    return start(jars)


def test_it_is_made_anew_for_another_java_or_spark(jars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, said = [], []

    def record(folder: Path, archive: Path, work: Path) -> None:
        made.append(folder)
        archive.write_bytes(b"classes")

    monkeypatch.setattr(classes, "_record", record)
    assert classes.prepare(jars, report=lambda *step: said.append(step))
    assert classes.prepare(jars, report=lambda *step: said.append(step))
    assert len(made) == len(said) == 1, "nobody is told to wait for what is there"
    monkeypatch.setattr(classes, "version", lambda _: "9.9")
    assert classes.prepare(jars)
    assert len(made) == 2


def test_a_java_that_cannot_make_one_is_no_error(jars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, "_record", lambda *_: None)
    assert not classes.prepare(jars)
    assert not class_archive(jars).exists()
    options = spark_conf(Settings.from_env({"TIDELINE_JARS": str(jars)}))["spark.driver.extraJavaOptions"]
    assert "SharedArchiveFile" not in options
