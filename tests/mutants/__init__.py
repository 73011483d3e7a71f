"""Mutants of the product: places that are wrong on purpose, each with the tests that must object to it."""

import re
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
# Neither what is installed nor what tests and jobs have left behind.
_LEFT_OUT = (".*", "__pycache__", "*.egg-info", "data", "node_modules")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One place of a file, what stands there instead, and the tests of which one must fail then.

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
        """Change the place in a copy of the project; why not, if it is not there exactly once."""
        file = project / self.file
        text = file.read_text()
        if (found := text.count(self.old)) != 1:
            return f"its text is {found} times in {self.file}, not once: change {HERE.name} with the code"
        file.write_text(text.replace(self.old, self.new))
        return ""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a mutant: killed, survived, or broken (it says nothing about the tests)."""

    mutant: Mutant
    kind: str
    seconds: float
    words: str

    @property
    def is_bad(self) -> bool:
        """Whether it is not what the list says: also one that is killed by now, and is said to survive."""
        return self.kind != ("survived" if self.mutant.survives else "killed")


def mutants() -> list[Mutant]:
    """All of them, as the list has them."""
    listed = tomllib.loads((HERE / "mutants.toml").read_text())["mutant"]
    return [Mutant(**{**each, "tests": tuple(each["tests"])}) for each in listed]


def outcome(code: int | None, words: str) -> str:
    """What pytest's exit code and words say of a mutant; no code: its tests did not end in time.

    Only a test that fails kills. Where none could run, e.g. without Spark's jars, nothing is known about the mutant.
    """
    if code in (0, None):
        return "survived" if code == 0 else "killed"
    return "killed" if code == 1 and re.search(r"^\d+ failed\b", words, re.MULTILINE) else "broken"


def copy_of(project: Path, target: Path) -> Path:
    """The sources of a project, to be changed, with the same jars."""
    shutil.copytree(project, target, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    (target / ".tideline").mkdir()
    (target / ".tideline" / "jars").symlink_to((project / ".tideline" / "jars").resolve())
    return target
