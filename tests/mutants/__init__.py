"""Mutants of the product: places that are wrong on purpose, each with the tests that must object to it."""

import re
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
# Neither installed files nor files that tests and jobs have left behind.
_LEFT_OUT = (".*", "__pycache__", "*.egg-info", "data", "node_modules")
# How a test ends that has reached the limit of a single test.
_TIMED_OUT = "from pytest-timeout"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One place of a file, its wrong text, and the tests. At least one of them must fail with the wrong text.

    ``breaks`` is the invariant of the reliability plan that no longer holds. ``survives`` says why no test fails today;
    it is empty for all others.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""

    def apply(self, project: Path) -> str:
        """Change the place in a copy of the project; the reason if it is not there exactly once."""
        file = project / self.file
        text = file.read_text()
        if (found := text.count(self.old)) != 1:
            return f"its text is {found} times in {self.file}, not once: change {HERE.name} with the code"
        file.write_text(text.replace(self.old, self.new))
        return ""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a mutant: killed or survived; or timeout or broken, which show nothing about the tests."""

    mutant: Mutant
    kind: str
    seconds: float
    words: str

    @property
    def is_bad(self) -> bool:
        """Whether it differs from the list: also if a mutant is killed that the list calls a survivor."""
        return self.kind != ("survived" if self.mutant.survives else "killed")


def mutants() -> list[Mutant]:
    """All mutants, in the order of the lists."""
    listed = [each for file in sorted(HERE.glob("*.toml")) for each in tomllib.loads(file.read_text())["mutant"]]
    return [Mutant(**{**each, "tests": tuple(each["tests"])}) for each in listed]


def outcome(code: int | None, words: str) -> str:
    """The result of a mutant by pytest's exit code and output; no code: its tests did not end in time.

    Only a failed test kills a mutant. If no test could run, e.g. without Spark's jars, the mutant is neither killed
    nor a survivor. The same is true if a test did not end in time: on a slow machine this happens without a mutant.
    """
    if code is None or _TIMED_OUT in words:
        return "timeout"
    if code == 0:
        return "survived"
    return "killed" if code == 1 and re.search(r"^(=+ )?\d+ failed\b", words, re.MULTILINE) else "broken"


def copy_of(project: Path, target: Path) -> Path:
    """Copy the sources of a project, so that they can be changed; the copy uses the same jars."""
    shutil.copytree(project, target, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    (target / ".tideline").mkdir()
    (target / ".tideline" / "jars").symlink_to((project / ".tideline" / "jars").resolve())
    return target
