"""Spark's classes as Java's class data sharing keeps them: read from one file, instead of 300 jars at each start.

A start of Spark loads 20,000 classes, which is half of its processor time, and every driver pays it. The file is only
ever an offer: a Java or a Spark of another kind does without, and says nothing.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from jobs.settings import PROJECT, class_archive
from local.jars.java import find_java
from local.jars.lock import one_at_a_time

_TIMEOUT_SECONDS = 300


def prepare(folder: Path) -> bool:
    """Make the archive of this Java and this Spark beside the jars, unless it is there; whether there is one now."""
    archive, made_for = class_archive(folder), _made_for()
    with one_at_a_time(folder / ".lock"):
        stamp = archive.with_suffix(".txt")
        if archive.exists() and stamp.exists() and stamp.read_text() == made_for:
            return True
        archive.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".classes-") as work:
            new = Path(work) / archive.name
            _record(folder, new, Path(work))
            if not new.exists():
                return False
            os.replace(new, archive)
        stamp.write_text(made_for)
    return True


def _made_for() -> str:
    """An archive holds for one Java and one class path, which is where pyspark is installed."""
    java = find_java()
    release = (java.home / "release").read_bytes() if (java.home / "release").exists() else b""
    lesson = Path(__file__).with_name("lesson.py").read_bytes()
    parts = (str(java.binary).encode(), release, sys.prefix.encode(), version("pyspark").encode(), lesson)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _record(folder: Path, archive: Path, work: Path) -> None:
    """One driver does a bit of everything; its Java writes down at its end what it had loaded."""
    java = find_java()
    environment = {
        **os.environ,
        "JAVA_HOME": str(java.home),
        "TIDELINE_JARS": str(folder),
        "SPARK_SUBMIT_OPTS": f"-XX:ArchiveClassesAtExit={archive} -Xlog:disable",
    }
    # Java outlives Python by the seconds that it writes: the end of their common output is the end of both.
    subprocess.run(
        [sys.executable, "-m", "local.jars.lesson", str(work)],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        check=False,
        timeout=_TIMEOUT_SECONDS,
    )
