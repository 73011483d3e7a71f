"""An archive of Spark's classes for Java's class data sharing: one file is read at each start, instead of 300 jars.

A start of Spark loads 20,000 classes, which takes half of its processor time, and every driver pays it. The file is
optional: another version of Java or Spark silently ignores it.
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
from local.steps import Report, silent

_TIMEOUT_SECONDS = 300


def prepare(folder: Path, *, report: Report = silent) -> bool:
    """Make the archive for this Java and this Spark beside the jars, unless it exists. Return whether it exists now."""
    archive, made_for = class_archive(folder), _made_for()
    with one_at_a_time(folder / ".lock"):
        stamp = archive.with_suffix(".txt")
        if archive.exists() and stamp.exists() and stamp.read_text() == made_for:
            return True
        report("Spark's classes, once for all starts", "about 30 s")
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
    """A digest of all that an archive is valid for: the Java, the environment, the version of pyspark, the lesson."""
    java = find_java()
    release = (java.home / "release").read_bytes() if (java.home / "release").exists() else b""
    lesson = Path(__file__).with_name("lesson.py").read_bytes()
    parts = (str(java.binary).encode(), release, sys.prefix.encode(), version("pyspark").encode(), lesson)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _record(folder: Path, archive: Path, work: Path) -> None:
    """Run one driver that uses all parts of Spark that jobs use. Its Java writes the loaded classes when it ends."""
    java = find_java()
    environment = {
        **os.environ,
        "JAVA_HOME": str(java.home),
        "TIDELINE_JARS": str(folder),
        "SPARK_SUBMIT_OPTS": f"-XX:ArchiveClassesAtExit={archive} -Xlog:disable",
    }
    # Java ends some seconds after Python, since it still writes. Both have ended when their common output ends.
    subprocess.run(
        [sys.executable, "-m", "local.jars.lesson", str(work)],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        check=False,
        timeout=_TIMEOUT_SECONDS,
    )
