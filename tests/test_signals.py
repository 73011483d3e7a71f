"""A signal asks the process to stop, also at the moment when it begins to wait for that."""

import os
import signal

import pytest

from jobs.signals import stop_on_signal

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("once", [False, True])
def test_a_signal_at_the_begin_of_a_wait_ends_the_wait(number: signal.Signals, once: bool) -> None:
    """A thread that begins to wait for an event holds its lock for a moment."""
    heard: list[signal.Signals] = []
    with stop_on_signal(heard.append, once=once) as stop:
        with stop._cond:  # type: ignore[attr-defined]
            os.kill(os.getpid(), number)
            assert not stop._flag  # type: ignore[attr-defined]
        assert stop.wait(10)
    assert heard == [number]


@pytest.mark.parametrize(("once", "acts"), [(False, 0), (True, 1)])
def test_only_on_request_a_second_signal_acts_as_before(once: bool, acts: int) -> None:
    acted: list[int] = []
    before = {number: signal.signal(number, lambda number, _: acted.append(number)) for number in SIGNALS}
    try:
        with stop_on_signal(once=once) as stop:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            assert stop.wait(10)
            assert acted == [signal.SIGINT] * acts
            os.kill(os.getpid(), signal.SIGTERM)
            assert acted == [signal.SIGINT] * acts, "the first one of another kind is a request"
        os.kill(os.getpid(), signal.SIGTERM)
        assert acted == [*[signal.SIGINT] * acts, signal.SIGTERM], "the handlers are given back"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
