"""`make test-mutants`: break the product on purpose, one place at a time, and see that the named tests object.

`make test-mutants ARGS="lease boundary"` runs only mutants with one of these words in the name.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants import HERE, PROJECT, Mutant, Result, copy_of, mutants, outcome

# Two keep a machine with two cores busy. More would make tests with deadlines fail for other reasons.
AT_ONCE = 2
TIMEOUT_SECONDS = 400
# The limit for all their tests together, in a copy without a change.
ALL_SECONDS = 1200
_NOTHING = "nothing is changed"


def run(tests: Iterable[str], project: Path, timeout_seconds: float = TIMEOUT_SECONDS) -> tuple[int | None, str]:
    """Run tests in a copy of the project: the exit code (none if they did not end in time) and the output."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(project), str(project / "plugins")))}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return None, f"no end within {timeout_seconds:.0f} s"
    return done.returncode, done.stdout + done.stderr


def judge(mutant: Mutant) -> Result:
    """Copy the project, change one place of it, and run the tests that must fail."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        project = copy_of(PROJECT, Path(folder) / "project")
        if problem := mutant.apply(project):
            return Result(mutant=mutant, kind="broken", seconds=0.0, words=problem)
        code, words = run(mutant.tests, project)
    result = Result(mutant=mutant, kind=outcome(code, words), seconds=time.monotonic() - began, words=words)
    print(f"{result.kind:9} {result.seconds:5.0f} s  {mutant.breaks:4} {mutant.name}", flush=True)
    return result


def sound(chosen: Iterable[Mutant]) -> bool:
    """Whether all tests pass in a copy without a change: otherwise their failures show nothing about mutants."""
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    with tempfile.TemporaryDirectory() as folder:
        code, words = run(tests, copy_of(PROJECT, Path(folder) / "project"), ALL_SECONDS)
    if code != 0:
        print(words[-3000:])
    print(f"{'passed' if code == 0 else 'failed':9}          {_NOTHING}", flush=True)
    return code == 0


def main() -> int:
    """Run the mutants; 1 if a result differs from the list, or if tests fail without a change."""
    parser = argparse.ArgumentParser(prog="make test-mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="run only mutants whose names contain one of these")
    words = parser.parse_args().words
    chosen = [mutant for mutant in mutants() if not words or any(word in mutant.name for word in words)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        is_sound = pool.submit(sound, chosen)
        results = list(pool.map(judge, chosen))
    bad = [result for result in results if result.is_bad]
    for result in bad:
        print(f"\n{result.kind}: {result.mutant.name} ({result.mutant.file})\n{result.words[-1500:]}")
    killed = sum(result.kind == "killed" for result in results)
    known = [result.mutant for result in results if result.mutant.survives and result.kind == "survived"]
    print(f"\n{killed} of {len(results)} mutants are killed, {len(known)} survive as {HERE.name} says")
    for mutant in known:
        print(f"  {mutant.name}: {mutant.survives}")
    return 1 if bad or not is_sound.result() else 0


if __name__ == "__main__":
    sys.exit(main())
