import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from jobs.refusal import Refusal
from local.platform.process import MARKER, Service, kill, marked, session_of
from tests.processes import wait_until

_SLEEPER = "import time; print('ready', flush=True); time.sleep(600)"
_STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + _SLEEPER
_PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {_SLEEPER!r}]); " + _SLEEPER


@pytest.fixture
def home(tmp_path):
    yield tmp_path
    kill(marked(tmp_path))


def _service(home: Path, code: str = _SLEEPER) -> Service:
    return Service(name="sleeper", home=home, command=(sys.executable, "-c", code), env=dict(os.environ))


def _started(home: Path, code: str = _SLEEPER) -> Service:
    service = _service(home, code)
    service.start()
    service.wait_ready(lambda: "ready" in service.log.read_text(), 20)
    return service


def test_an_equal_service_finds_the_process_again(home):
    _started(home)
    process = _service(home).process()
    assert process is not None
    assert os.getsid(process.pid) == process.pid


def test_stop_asks_first(home):
    service = _started(home, "import signal, sys; signal.signal(15, lambda *_: sys.exit(print('bye'))); " + _SLEEPER)
    service.stop(10)
    assert service.process() is None
    assert "bye" in service.log.read_text()
    assert marked(home) == []


def test_stop_kills_what_does_not_listen(home):
    service = _started(home, _STUBBORN)
    service.stop(0.2)
    assert marked(home) == []


def test_children_of_a_dead_leader_are_found_and_ended(home):
    service = _started(home, _PARENT)
    wait_until(lambda: len(marked(home)) == 2, "a child", 10)
    os.kill(service.process().pid, signal.SIGKILL)
    wait_until(lambda: service.process() is None, "the death of its parent", 10)
    assert len(marked(home)) == 1
    service.kill()
    assert marked(home) == []


def test_start_ends_what_a_crash_left(home):
    service = _started(home, _PARENT)
    wait_until(lambda: len(marked(home)) == 2, "a child", 10)
    os.kill(service.process().pid, signal.SIGKILL)
    wait_until(lambda: service.process() is None, "the death of its parent", 10)
    _started(home)
    assert [process.pid for process in marked(home)] == [service.process().pid]


def _write_record(home: Path, record: object) -> None:
    (home / "run").mkdir()
    (home / "run" / "sleeper.pid").write_text(record if isinstance(record, str) else json.dumps(record))


def test_a_recycled_pid_is_not_ours_and_not_touched(home):
    """A process with this pid runs, but it began at another time and has no mark."""
    with subprocess.Popen([sys.executable, "-c", _SLEEPER], stdout=subprocess.DEVNULL) as stranger:
        _write_record(home, {"pid": stranger.pid, "started": psutil.Process(stranger.pid).create_time() - 60})
        service = _service(home)
        assert service.process() is None
        service.stop(1)
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize("record", ["", "{", "[]", "17", {"pid": 2**22 + 1, "started": 0.0}, {"started": 0.0}])
def test_a_stale_or_torn_pid_file_counts_as_none(home, record):
    _write_record(home, record)
    assert _service(home).process() is None
    _started(home)
    assert _service(home).process() is not None


def test_another_stack_is_left_alone(home, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    try:
        _started(other)
        assert marked(home) == []
        assert len(marked(other)) == 1
    finally:
        kill(marked(other))


def test_the_mark_is_handed_on_to_what_detaches(home):
    """A process that moves into its own session, as Spark drivers may, still has the mark."""
    detach = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {_SLEEPER!r}], start_new_session=True)"
    service = _service(home, detach)
    service.start()
    wait_until(lambda: "ready" in service.log.read_text(), "a process that detaches", 10)
    (detached,) = (process for process in marked(home) if process.pid != service.session())
    assert session_of(detached) == detached.pid
    assert detached.environ()[MARKER] == str(home)


def test_a_service_that_ends_while_starting_is_refused_with_its_last_words(home):
    service = _service(home, "print('no such listener'); raise SystemExit(3)")
    service.start()
    with pytest.raises(Refusal, match=r"(?s)sleeper ended while starting.*sleeper\.log.*no such listener"):
        service.wait_ready(lambda: False, 20)


def test_a_service_that_is_never_ready_is_refused(home):
    service = _started(home)
    with pytest.raises(Refusal, match="sleeper was not ready after 0 s"):
        service.wait_ready(lambda: False, 0.3)


def test_a_large_log_is_put_aside_at_the_next_start(home):
    service = _service(home)
    service.log.parent.mkdir()
    with service.log.open("w") as log:
        log.truncate(20_000_001)
    _started(home)
    assert service.log.with_suffix(".log.1").stat().st_size == 20_000_001
    assert service.log.stat().st_size < 1000
