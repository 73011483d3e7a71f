"""`step` of local/step.sh, run with quick commands: what it shows, what it returns, and that its ticker always ends."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from jobs.settings import PROJECT
from tests.processes import wait_until

# A test may run where Ctrl-C is ignored, and sh cannot trap what was ignored at its start.
WITH_CTRL_C = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
)
SHELLS = [["sh"], *([["bash", "--posix"]] if shutil.which("bash") else [])]


@pytest.fixture(params=SHELLS, ids=lambda words: words[0])
def shell(request: pytest.FixtureRequest) -> list[str]:
    return [sys.executable, "-c", WITH_CTRL_C, *request.param, "-euc"]


def script(command: str, log_seconds: int = 30) -> str:
    """A script that runs one step, and shows that it goes on after it."""
    step = PROJECT / "local" / "step.sh"
    return f". {step}; LOG_SECONDS={log_seconds}; step 'a thing' 'about 3 s' {command}; echo next"


@contextmanager
def started(shell: list[str], script: str, stderr: int, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A script in a session of its own; what is left of it is killed at the end."""
    environment = {**os.environ, "TERM": "xterm", **env}
    run = subprocess.Popen(
        [*shell, script],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    )
    try:
        yield run
    finally:
        for process in living(run.pid):
            with suppress(psutil.Error):
                process.kill()
        run.communicate()


def living(session: int) -> list[psutil.Process]:
    """The processes of the session that have not ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def in_a_log(shell: list[str], script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*shell, script], capture_output=True, text=True, check=False, timeout=60)


def without_times(shown: str) -> list[str]:
    """Its lines, with N for the seconds that have passed."""
    return re.sub(r"after \d+ s$", "after N s", shown, flags=re.MULTILINE).splitlines()


def test_a_log_has_a_line_at_the_begin_and_one_at_the_end(shell):
    ran = in_a_log(shell, script("sh -c 'echo chatter; echo more >&2'"))
    assert (ran.returncode, ran.stdout) == (0, "next\n")
    assert without_times(ran.stderr) == ["tideline: a thing (about 3 s)", "tideline: a thing: done after N s"]


def test_a_failure_keeps_its_exit_code_and_shows_its_output(shell):
    ran = in_a_log(shell, script("sh -c 'echo no answer; echo from there >&2; exit 7'"))
    assert (ran.returncode, ran.stdout) == (7, "")
    assert without_times(ran.stderr)[1:] == ["tideline: a thing: failed after N s", "no answer", "from there"]


def test_a_failure_can_be_handled(shell):
    ran = in_a_log(shell, script("false || echo handled"))
    assert (ran.returncode, ran.stdout) == (0, "handled\nnext\n")
    assert len(ran.stderr.splitlines()) == 2, "a failure without output has no empty line"


def test_a_log_has_lines_in_between(shell, tmp_path):
    log = tmp_path / "log"
    until_shown = f"sh -c 'until [ $(grep -c \"thing: [0-9]\" {log}) -ge 2 ]; do sleep 0.1; done'"
    with log.open("wb") as stream, started(shell, script(until_shown, log_seconds=1), stream.fileno()) as run:
        assert run.wait(60) == 0
    first, *between, last = without_times(log.read_text())
    assert (first, last) == ("tideline: a thing (about 3 s)", "tideline: a thing: done after N s")
    assert all(line.startswith("tideline: a thing: ") and line.endswith(" s (about 3 s)") for line in between)
    assert len(set(between)) == len(between) >= 2, "each time is shown once"


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    try:
        yield ours, theirs
    finally:
        os.close(ours)
        os.close(theirs)


def shown_until(wanted: str, terminal: int) -> str:
    """What the terminal has shown until the pattern came."""
    shown = b""
    while not re.search(wanted, shown.decode()):
        assert select.select([terminal], [], [], 60)[0], f"{wanted!r} did not come after {shown!r}"
        shown += os.read(terminal, 1000)
    return shown.decode()


def test_a_terminal_has_one_line_that_counts(shell):
    with terminal() as (ours, theirs), started(shell, script("sleep 600"), theirs):
        shown = shown_until("thing: [1-9]+ s", ours)
    assert "\n" not in shown
    before, *frames = shown.split("\r\x1b[K")
    assert before == ""
    assert re.fullmatch(r"\x1b\[\?7ltideline: a thing: \d+ s \(about 3 s\)\x1b\[\?7h", frames[0])


def test_a_terminal_keeps_the_last_line_only(shell):
    with terminal() as (ours, theirs), started(shell, script("sh -c 'echo no answer; exit 7'"), theirs) as run:
        shown = shown_until("no answer", ours)
        assert run.wait(60) == 7
    lines = without_times(shown.split("\r\x1b[K")[-1].replace("\r\n", "\n"))
    assert lines == ["tideline: a thing: failed after N s", "no answer"]


def test_a_dumb_terminal_is_a_log(shell):
    with terminal() as (ours, theirs), started(shell, script("true"), theirs, TERM="dumb") as run:
        shown = shown_until("done after", ours)
        assert run.wait(60) == 0
    assert "\x1b" not in shown


def test_ctrl_c_ends_the_command_and_the_ticker(shell, tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as stream, started(shell, script("sleep 600", log_seconds=1), stream.fileno()) as run:
        wait_until(lambda: "a thing: " in log.read_text(), "the ticker has ticked")
        wait_until(lambda: any(tickers(run.pid)), "the ticker sleeps")
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(60) == -signal.SIGINT, "so that make knows, too"
        assert not living(run.pid)
    assert without_times(log.read_text())[-1] == "tideline: a thing: stopped after N s"


def test_no_ticker_stays_behind_a_step(shell):
    with started(shell, f"{script('true')}; read go", subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"next\n"
        assert [process.pid for process in living(run.pid)] == [run.pid]


def test_the_ticker_ends_if_the_script_is_killed(shell, tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as stream, started(shell, script("sleep 600", log_seconds=1), stream.fileno()) as run:
        wait_until(lambda: "a thing: " in log.read_text(), "the ticker has ticked")
        found: list[int] = []
        wait_until(lambda: bool(found.extend(tickers(run.pid)) or found), "the ticker sleeps")
        run.kill()
        run.wait(60)
        wait_until(lambda: found[0] not in [process.pid for process in living(run.pid)], "the ticker has ended")


def tickers(session: int) -> Iterator[int]:
    """The process that sleeps for a second, again and again."""
    for process in living(session):
        with suppress(psutil.Error):
            if process.cmdline() == ["sleep", "1"]:
                yield process.ppid()
