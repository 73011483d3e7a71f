"""Find and check the one Java that everything runs on. If it is missing, the refusal says how to get it."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jobs.refusal import Refusal

SUPPORTED = (17, 21)
HOW_TO_GET_IT = (
    "install Java 17 or 21 (Debian/Ubuntu: apt-get install openjdk-17-jre-headless; Fedora: dnf install "
    "java-21-openjdk-headless; macOS: brew install openjdk@21; without root: unpack a Temurin JRE) "
    "and put it on PATH or set JAVA_HOME"
)


@dataclass(frozen=True, kw_only=True)
class Java:
    """A Java runtime that Spark and Kafka can use."""

    binary: Path
    home: Path
    major: int


def find_java(env: Mapping[str, str] | None = None) -> Java:
    """The Java of `JAVA_HOME`, else of `PATH`. Refuse if it is missing or has an unsupported version."""
    env = os.environ if env is None else env
    named = env.get("JAVA_HOME")
    found = shutil.which(str(Path(named) / "bin" / "java")) if named else shutil.which("java", path=env.get("PATH", ""))
    if found is None:
        raise Refusal(
            f"JAVA_HOME={named!r} holds no bin/java: {HOW_TO_GET_IT}" if named else f"no Java: {HOW_TO_GET_IT}"
        )
    binary = Path(found).resolve()
    major = _major(binary)
    if major not in SUPPORTED:
        raise Refusal(f"{found} is Java {major}, Spark needs 17 or 21: {HOW_TO_GET_IT}")
    return Java(binary=binary, home=binary.parent.parent, major=major)


def _major(binary: Path) -> int:
    answer = subprocess.run([binary, "-version"], capture_output=True, text=True, check=False, timeout=30)
    version = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    if version is None:
        raise Refusal(f"`{binary} -version` shows no version: {HOW_TO_GET_IT}")
    return int(version[1])
