"""Ask this process to stop by a signal, so that the work under way can finish first."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_signal(
    heard: Callable[[signal.Signals], object] = lambda number: None, *, once: bool = False
) -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set. ``heard`` is called with each signal.

    ``once``: only the first signal of a kind sets the event. The second one acts as it did before.
    """
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def request(number: int, _frame: FrameType | None) -> None:
        caught = signal.Signals(number)
        heard(caught)
        if once:
            signal.signal(caught, before[caught])
        # Another thread must set the event. This thread may have been about to wait for the event when the signal came.
        # Then it holds the event's lock, and would wait for itself.
        threading.Thread(target=stop.set).start()

    for number in before:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
