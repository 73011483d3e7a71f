"""A fail point kills the process at the given place, once. It does nothing when it is off."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.failpoints import FailPoint

_RUN = """
from jobs.failpoints import FailPoint, may_fail_at
for batch in range(3):
    for point in FailPoint:
        may_fail_at(point, batch)
        print(point, batch, flush=True)
"""
_ALL = [f"{point} {batch}" for batch in range(3) for point in FailPoint]


def run(switch: str | None) -> tuple[int, list[str]]:
    env = {name: value for name, value in os.environ.items() if name != "TIDELINE_FAILPOINT"}
    env |= {"TIDELINE_FAILPOINT": switch} if switch is not None else {}
    done = subprocess.run([sys.executable, "-c", _RUN], env=env, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("switch", [None, "", "F1:7:hit", "F0:1:hit"])
def test_off_or_elsewhere_nothing_happens(switch: str | None, tmp_path: Path) -> None:
    assert run(switch and switch.replace("hit", str(tmp_path / "hit"))) == (0, _ALL)
    assert list(tmp_path.iterdir()) == []


def test_without_a_batch_it_kills_in_the_first(tmp_path: Path) -> None:
    assert run(f"F1::{tmp_path / 'hit'}") == (-signal.SIGKILL, [])


@pytest.mark.parametrize("point", list(FailPoint))
def test_it_kills_there_and_only_once(point: FailPoint, tmp_path: Path) -> None:
    hit = tmp_path / "with:colon"
    code, reached = run(f"{point}:1:{hit}")
    assert code == -signal.SIGKILL
    assert reached == _ALL[: _ALL.index(f"{point} 1")]
    assert hit.read_text().startswith(f"{point} batch 1 process ")
    assert run(f"{point}:1:{hit}") == (0, _ALL)
