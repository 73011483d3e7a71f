"""The list of mutants fits the code: each place occurs once, and every invariant is broken by some mutant."""

import re
from pathlib import Path

import pytest

from tests.mutants import PROJECT, Mutant, Result, mutants, outcome
from tests.mutants.__main__ import progress, run

MUTANTS = mutants()
# The shortest limit for a run of pytest.
TIMEOUT_SECONDS = 1


def test_the_list_covers_all_invariants_and_many_modules() -> None:
    assert len(MUTANTS) >= 25
    assert {mutant.breaks for mutant in MUTANTS} == {f"I{number}" for number in range(1, 11)}
    assert len({mutant.file for mutant in MUTANTS}) >= 8
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: re.sub(r"\W+", "-", mutant.name))
def test_a_mutant_changes_one_place_and_names_tests_that_exist(mutant: Mutant) -> None:
    text = (PROJECT / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"its place in {mutant.file} has changed: change the mutant, too"
    assert mutant.old != mutant.new
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (PROJECT / file).read_text()


def test_a_mutant_is_applied_only_where_its_place_is_there_once(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text("a = 1\nb = 1\n")

    def applied(old: str) -> str:
        return Mutant(name="m", breaks="I1", file="code.py", old=old, new="c", tests=()).apply(tmp_path)

    assert "2 times" in applied(" = 1")
    assert "0 times" in applied("z")
    assert file.read_text() == "a = 1\nb = 1\n"
    assert applied("b = 1") == ""
    assert file.read_text() == "a = 1\nc\n"


@pytest.mark.parametrize(
    ("code", "words", "survives", "kind", "is_bad"),
    [
        (0, "9 passed in 1.00s", "", "survived", True),
        (1, "1 failed, 8 passed in 1.00s", "", "killed", False),
        (1, "1 error in 1.00s", "", "broken", True),
        (None, "no end within 400 s", "", "timeout", True),
        (None, "no end within 400 s", "a reason", "timeout", True),
        (1, "Failed: Timeout (>300.0s) from pytest-timeout.\n1 failed in 300.00s", "", "timeout", True),
        (1, "=== 1 failed, 8 passed in 1.00s ===", "", "killed", False),
        (2, "1 error in 1.00s", "", "broken", True),
        (5, "no tests ran in 1.00s", "", "broken", True),
        (0, "9 passed in 1.00s", "a reason", "survived", False),
        (1, "1 failed in 1.00s", "a reason", "killed", True),
    ],
)
def test_only_what_tests_say_counts(code: int | None, words: str, survives: str, kind: str, is_bad: bool) -> None:
    mutant = Mutant(name="m", breaks="I1", file="f", old="a", new="b", tests=(), survives=survives)
    assert outcome(code, f"FAILED test\n{words}\n") == kind
    assert Result(mutant=mutant, kind=kind, seconds=0, words="").is_bad is is_bad


def test_tests_that_do_not_end_are_no_kill_and_are_named(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text("import time\ndef test_hangs():\n    time.sleep(600)\n")
    code, words = run(["test_hangs.py"], tmp_path, timeout_seconds=TIMEOUT_SECONDS)
    assert code is None
    assert outcome(code, words) == "timeout"
    assert words.endswith(f"no end within {TIMEOUT_SECONDS} s")


def test_a_line_tells_how_far_a_long_run_is() -> None:
    mutant = Mutant(name="a name", breaks="I1", file="f", old="a", new="b", tests=())
    result = Result(mutant=mutant, kind="timeout", seconds=400, words="")
    assert progress(7, 78, 605.4, result) == "   7/78, 10:05  timeout     400 s  I1   a name"
