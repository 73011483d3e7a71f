import stat
from pathlib import Path

import pytest

from jobs.refusal import Refusal
from local.jars.java import find_java


def _java(folder: Path, version_line: str) -> Path:
    """A Java home whose binary answers `-version` as Java does: on stderr."""
    binary = folder / "bin" / "java"
    binary.parent.mkdir(parents=True)
    binary.write_text(f"#!/bin/sh\necho '{version_line}' >&2\n")
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    return folder


@pytest.mark.parametrize(
    ("line", "major"), [('openjdk version "17.0.15" 2025-04-15', 17), ('openjdk version "21" 2023-09-19 LTS', 21)]
)
def test_java_home_wins_over_path(tmp_path, line, major):
    named = _java(tmp_path / "named", line)
    other = _java(tmp_path / "other", 'openjdk version "11.0.2"')
    java = find_java({"JAVA_HOME": str(named), "PATH": str(other / "bin")})
    assert (java.major, java.home, java.binary) == (major, named, named / "bin" / "java")


def test_java_is_found_on_path(tmp_path):
    home = _java(tmp_path / "java", 'openjdk version "17.0.1"')
    assert find_java({"PATH": str(home / "bin")}).home == home


@pytest.mark.parametrize("line", ['java version "1.8.0_401"', 'openjdk version "11.0.2"', 'openjdk version "25.0.1"'])
def test_another_version_is_refused_with_how_to_get_one(tmp_path, line):
    home = _java(tmp_path / "java", line)
    with pytest.raises(Refusal, match=r"is Java (8|11|25), Spark needs 17 or 21: install Java 17 or 21"):
        find_java({"PATH": str(home / "bin")})


def test_no_java_is_refused_with_how_to_get_one(tmp_path):
    with pytest.raises(Refusal, match="no Java: install Java 17 or 21"):
        find_java({"PATH": str(tmp_path)})


def test_a_java_home_without_java_is_refused(tmp_path):
    with pytest.raises(Refusal, match="holds no bin/java"):
        find_java({"JAVA_HOME": str(tmp_path), "PATH": "/usr/bin"})


def test_a_java_that_does_not_say_its_version_is_refused(tmp_path):
    home = _java(tmp_path / "java", "Segmentation fault")
    with pytest.raises(Refusal, match="shows no version"):
        find_java({"PATH": str(home / "bin")})
