"""Control folders, and another process that holds one."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from jobs.control import folder as module
from jobs.control import lease as lease_module
from jobs.control.folder import Control
from jobs.storage.documents import Documents
from tests.control.made import JOB

_HOLD = """
import sys
from pathlib import Path
from jobs.control.folder import Control
from jobs.control.lease import Lease
lease = Lease.acquire(Control.of(Path(sys.argv[1]), "rolling_sum"))
print(lease.epoch, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["folder", "object store"])
def control(request: pytest.FixtureRequest, tmp_path: Path) -> Control:
    if request.param == "folder":
        return Control.of(tmp_path, JOB)
    return Control(Documents(MemoryStore()), JOB)


@pytest.fixture
def shared(tmp_path: Path) -> Control:
    """A control folder that other processes see, too."""
    return Control.of(tmp_path, JOB)


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the looks; they are still long enough to see a heartbeat every hundredth of a second."""
    monkeypatch.setattr(module, "LOOK_ON_SECONDS", 0.5)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.02)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.02)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds epoch 1."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    yield process
    process.kill()
    process.communicate()
