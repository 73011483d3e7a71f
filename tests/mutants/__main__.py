"""`make test-mutants`: break the product on purpose, one place at a time, and see that the named tests object.

`make test-mutants ARGS="lease boundary"` runs only mutants with one of these words in the name.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.mutants import HERE, PROJECT, Mutant, Result, copy_of, mutants, outcome

# Two keep a machine with two cores busy. More would make tests with deadlines fail for other reasons.
AT_ONCE = 2
TIMEOUT_SECONDS = 400
# The limit for all their tests together, in a copy without a change.
ALL_SECONDS = 1800
_NOTHING = "nothing is changed"


def run(tests: Iterable[str], project: Path, timeout_seconds: float = TIMEOUT_SECONDS) -> tuple[int | None, str]:
    """Run tests in a copy of the project: the exit code (none if they did not end in time) and the output.

    The output names each test when it begins, so its last line shows the test that did not end.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(project), str(project / "plugins")))}
    command = [sys.executable, "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=timeout_seconds)
    except subprocess.TimeoutExpired as error:
        # It has bytes even if text was asked for.
        begun = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return None, f"{begun}\nno end within {timeout_seconds:.0f} s"
    return done.returncode, done.stdout + done.stderr


def judge(mutant: Mutant) -> Result:
    """Copy the project, change one place of it, and run the tests that must fail."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        project = copy_of(PROJECT, Path(folder) / "project")
        if problem := mutant.apply(project):
            return Result(mutant=mutant, kind="broken", seconds=0.0, words=problem)
        code, words = run(mutant.tests, project)
    return Result(mutant=mutant, kind=outcome(code, words), seconds=time.monotonic() - began, words=words)


def sound(chosen: Iterable[Mutant]) -> bool:
    """Whether all tests pass in a copy without a change: otherwise their failures show nothing about mutants."""
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    with tempfile.TemporaryDirectory() as folder:
        code, words = run(tests, copy_of(PROJECT, Path(folder) / "project"), ALL_SECONDS)
    if code != 0:
        print(words[-3000:])
    print(f"{'':16}{'passed' if code == 0 else 'failed':9}          {_NOTHING}", flush=True)
    return code == 0


def progress(done: int, total: int, seconds: float, result: Result) -> str:
    """One line about a mutant: how many are done, the time since the begin of the run, and the result."""
    minutes, rest = divmod(round(seconds), 60)
    at = f"{done}/{total}, {minutes}:{rest:02}"
    return f"{at:>14}  {result.kind:9} {result.seconds:5.0f} s  {result.mutant.breaks:4} {result.mutant.name}"


def judge_all(chosen: Sequence[Mutant]) -> tuple[bool, list[Result]]:
    """Judge the mutants, and show each result. The first value tells whether their tests pass without a change."""
    began, results = time.monotonic(), list[Result]()
    print(f"{len(chosen)} mutants, {AT_ONCE} at a time; a mutant has {TIMEOUT_SECONDS} s at most", flush=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        is_sound = pool.submit(sound, chosen)
        for judged in as_completed([pool.submit(judge, mutant) for mutant in chosen]):
            results.append(judged.result())
            print(progress(len(results), len(chosen), time.monotonic() - began, results[-1]), flush=True)
    return is_sound.result(), results


def main() -> int:
    """Run the mutants; 1 if a result differs from the list, or if tests fail without a change."""
    parser = argparse.ArgumentParser(prog="make test-mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="run only mutants whose names contain one of these")
    words = parser.parse_args().words
    chosen = [mutant for mutant in mutants() if not words or any(word in mutant.name for word in words)]
    is_sound, results = judge_all(chosen)
    bad = [result for result in results if result.is_bad]
    for result in bad:
        print(f"\n{result.kind}: {result.mutant.name} ({result.mutant.file})\n{result.words[-1500:]}")
    killed = sum(result.kind == "killed" for result in results)
    known = [result.mutant for result in results if result.mutant.survives and result.kind == "survived"]
    print(f"\n{killed} of {len(results)} mutants are killed, {len(known)} survive as {HERE.name} says")
    for mutant in known:
        print(f"  {mutant.name}: {mutant.survives}")
    return 1 if bad or not is_sound else 0


if __name__ == "__main__":
    sys.exit(main())
