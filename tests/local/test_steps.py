"""Steps that take long: a line that counts on a terminal; lines at the begin, in between and at the end in a log."""

import io
import re
import threading

import pytest
from rich.console import Console

from local import steps
from tests.processes import wait_until


def log() -> tuple[Console, io.StringIO]:
    """A console that writes no colours, and what it has written."""
    shown = io.StringIO()
    return Console(file=shown, width=20), shown


def lines(shown: io.StringIO) -> list[str]:
    return re.sub(r"\b\d+ s\b", "N s", shown.getvalue()).splitlines()


def test_a_log_has_a_line_at_the_begin_and_one_at_the_end():
    console, shown = log()
    with steps.step(console, "Windows [of] a demo", "a while") as tell:
        tell("a detail")
        assert lines(shown) == ["Windows [of] a demo (a while)"]
    assert lines(shown)[1:] == ["✓ Windows [of] a demo N s"]


def test_a_log_has_lines_in_between(monkeypatch):
    monkeypatch.setattr(steps, "_LOG_SECONDS", 0.01)
    console, shown = log()
    with steps.step(console, "Windows", "a while") as tell:
        wait_until(lambda: "Windows: N s (a while)" in lines(shown), "a line without a detail")
        tell("waiting for [word_count]")
        wait_until(lambda: "Windows: N s (a while), waiting for [word_count]" in lines(shown), "a line with it")
    assert lines(shown)[-1] == "✓ Windows N s"


def test_a_failed_step_is_no_success():
    console, shown = log()
    with pytest.raises(ValueError, match="the reason"), steps.step(console, "Windows"):
        raise ValueError("the reason")
    assert lines(shown) == ["Windows", "✗ Windows N s"]


def test_each_report_ends_a_step_and_begins_the_next():
    console, shown = log()
    with steps.steps(console, "Platform") as report:
        report("jars", "at most a minute")
        report("broker")
        assert lines(shown) == ["Platform: jars (at most a minute)", "✓ Platform: jars N s", "Platform: broker"]
    assert lines(shown)[3:] == ["✓ Platform: broker N s"]


def test_a_failure_ends_the_step_in_which_it_happened():
    console, shown = log()

    def start() -> None:
        with steps.steps(console, "Platform") as report:
            report("jars")
            report("broker")
            raise ValueError("the reason")

    with pytest.raises(ValueError, match="the reason"):
        start()
    assert lines(shown)[1:] == ["✓ Platform: jars N s", "Platform: broker", "✗ Platform: broker N s"]


def test_nothing_ticks_after_a_step(monkeypatch):
    monkeypatch.setattr(steps, "_LOG_SECONDS", 0.01)
    console, shown = log()
    with steps.step(console, "Windows"):
        wait_until(lambda: len(lines(shown)) > 2, "some ticks")
    assert not [thread for thread in threading.enumerate() if thread.name == steps.TICKER]


def test_a_terminal_has_one_line_that_counts():
    shown = io.StringIO()
    console = Console(file=shown, width=80, force_terminal=True, force_interactive=True, color_system=None)
    with steps.step(console, "Windows", "a while") as tell:
        tell("waiting for word_count")
        counted = re.compile(r"Windows: [1-9]\d* s \(a while\), waiting for word_count")
        wait_until(lambda: bool(counted.search(shown.getvalue())), "a second has passed")
        assert "\n" not in shown.getvalue()
    assert re.search(r"✓ Windows \d+ s\n$", shown.getvalue())
