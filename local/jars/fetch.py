"""Fetch the jars of `jars.toml` once, check their sums, and place each file. Spark resolves no jars at submit time."""

import hashlib
import os
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from xml.sax.saxutils import quoteattr

from jobs.refusal import Refusal
from local.jars.java import find_java
from local.jars.lock import one_at_a_time
from local.steps import Report, silent

DECLARATION = Path(__file__).with_name("jars.toml")
_TIMEOUT_SECONDS = 900
_WAY_OUT = "check the network (proxy: JAVA_TOOL_OPTIONS), or set TIDELINE_MAVEN_URL to a mirror you can reach"


@dataclass(frozen=True, kw_only=True)
class Jar:
    """One published file, its sum, and its set: the class path that it belongs to (`spark`, `s3` or `broker`)."""

    set: str
    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def path(self) -> str:
        """Its path below the folder of jars."""
        return f"{self.set}/{self.artifact}-{self.version}.jar"


def declared() -> tuple[Jar, ...]:
    """Every jar that the declaration lists."""
    sets = tomllib.loads(DECLARATION.read_text())
    return tuple(Jar(set=name, **row) for name, rows in sets.items() for row in rows)


def missing(folder: Path, jars: Sequence[Jar]) -> list[Jar]:
    """The jars that are missing or differ from their declared sum."""
    return [jar for jar in jars if not _matches(folder / jar.path, jar)]


def verify(folder: Path, jars: Sequence[Jar] | None = None) -> None:
    """Refuse a folder unless it has exactly the declared jars."""
    jars = declared() if jars is None else jars
    wrong = [jar.path for jar in missing(folder, jars)] + [str(path) for path in _strangers(folder, jars)]
    if wrong:
        raise Refusal(f"{folder}: {len(wrong)} jars are missing or wrong, first {wrong[0]}: run `tideline jars`")


def fetch(
    folder: Path, jars: Sequence[Jar] | None = None, *, mirror: str | None = None, report: Report = silent
) -> list[Jar]:
    """Make the folder have exactly the declared jars. Return the jars that had to be fetched."""
    jars = declared() if jars is None else jars
    folder.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(folder / ".lock"):
        wanted = missing(folder, jars)
        if wanted:
            report(f"fetching {len(wanted)} jars", "up to 25 s on a fast line")
            with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
                _download(Path(work), wanted, mirror)
                _put_in_place(Path(work), folder, wanted)
        for path in _strangers(folder, jars):
            path.unlink()
    return wanted


def ivy_module(jars: Sequence[Jar]) -> str:
    """The jars for Ivy to fetch: every jar by name, without the dependencies of jars."""
    sets = "".join(f"<conf name={quoteattr(name)}/>" for name in sorted({jar.set for jar in jars}))
    rows = "".join(
        f"<dependency org={quoteattr(jar.group)} name={quoteattr(jar.artifact)} rev={quoteattr(jar.version)} "
        f'transitive="false" conf={quoteattr(f"{jar.set}->default")}/>'
        for jar in jars
    )
    return (
        '<ivy-module version="2.0"><info organisation="tideline" module="jars"/>'
        f"<configurations>{sets}</configurations>"
        f'<dependencies>{rows}<conflict org="*" module="*" manager="all"/></dependencies></ivy-module>'
    )


def ivy_settings(mirror: str | None) -> str:
    """The place for Ivy to fetch from: its own default repository, or a mirror of it."""
    root = f" root={quoteattr(mirror)}" if mirror else ""
    return (
        '<ivysettings><settings defaultResolver="maven"/><resolvers>'
        f'<ibiblio name="maven" m2compatible="true" usepoms="false"{root}/></resolvers></ivysettings>'
    )


def _matches(path: Path, jar: Jar) -> bool:
    return path.is_file() and _sha256(path) == jar.sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _strangers(folder: Path, jars: Sequence[Jar]) -> list[Path]:
    expected = {folder / jar.path for jar in jars}
    return sorted(
        path for name in {jar.set for jar in jars} for path in (folder / name).glob("*.jar") if path not in expected
    )


def _download(work: Path, jars: Sequence[Jar], mirror: str | None) -> None:
    (work / "ivy.xml").write_text(ivy_module(jars))
    (work / "ivysettings.xml").write_text(ivy_settings(mirror))
    # The cache is in the work folder, so the user's own Ivy cache is not used.
    places: list[str | Path] = [
        "-settings",
        work / "ivysettings.xml",
        "-ivy",
        work / "ivy.xml",
        "-cache",
        work / "cache",
    ]
    pattern = f"{work}/[conf]/[artifact]-[revision].[ext]"
    ivy = next((pyspark_folder() / "jars").glob("ivy-*.jar"))
    command = [find_java().binary, "-jar", ivy, "-warn", *places, "-retrieve", pattern]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise Refusal(f"fetching {len(jars)} jars took over {_TIMEOUT_SECONDS} s: {_WAY_OUT}") from None
    if ran.returncode:
        told = next(
            (line.strip() for line in (ran.stdout + ran.stderr).splitlines() if "not found" in line), "no answer"
        )
        raise Refusal(f"{len(jars)} jars could not be fetched ({told}): {_WAY_OUT}")


def pyspark_folder() -> Path:
    """Where pyspark is installed: SPARK_HOME, with its own jars and the Ivy that fetches ours."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise Refusal("pyspark is not installed: run `make install`")
    return Path(spec.origin).parent


def _put_in_place(work: Path, folder: Path, jars: Sequence[Jar]) -> None:
    for jar in jars:
        path = work / jar.path
        if not _matches(path, jar):
            found = _sha256(path) if path.is_file() else "nothing"
            raise Refusal(
                f"{jar.path}: its checksum is {found}, but {DECLARATION.name} has {jar.sha256}: "
                "the file was changed on the way or in the repository; do not use it before you know why"
            )
    for jar in jars:
        (folder / jar.set).mkdir(exist_ok=True)
        os.replace(work / jar.path, folder / jar.path)
