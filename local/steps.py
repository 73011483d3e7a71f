"""How a long step shows what it does, how long it has run, and how long it usually takes.

On a terminal, a step is one line that counts the seconds. In a log, it is a line at its begin, one every 30 seconds,
and one at its end. `local/step.sh` does the same before Python has its packages.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event, Thread
from typing import Protocol

from rich.console import Console
from rich.text import Text

Tell = Callable[[str], object]

TICKER = "tideline-ticker"
_LOG_SECONDS = 30.0


class Report(Protocol):
    """Says which step begins, and how long it usually takes. The step before it has ended."""

    def __call__(self, what: str, expected: str = "", /) -> object:
        """Begin the next step."""


def silent(what: str, expected: str = "", /) -> None:
    """A report that shows nothing."""


@contextmanager
def steps(console: Console, title: str) -> Iterator[Report]:
    """Show steps that follow each other: each report ends one and begins the next."""
    with ExitStack() as current:

        def begin(what: str, expected: str = "", /) -> None:
            current.close()
            current.enter_context(step(console, f"{title}: {what}", expected))

        yield begin


@contextmanager
def step(console: Console, title: str, expected: str = "") -> Iterator[Tell]:
    """Show one step while the block runs, and its duration afterwards. The block may tell details about it."""
    running = _Running(title, expected)
    mark = Text("✗", "red")
    try:
        with console.status(running) if console.is_interactive else _in_log(console, running):
            yield running.tell
        mark = Text("✓", "green")
    finally:
        ended = Text.assemble(mark, f" {title} ", (f"{running.seconds():.0f} s", "dim"))
        console.print(ended, soft_wrap=True)


class _Running:
    """A step that runs: its line counts the seconds each time it is shown."""

    def __init__(self, title: str, expected: str) -> None:
        self._began = time.monotonic()
        self._title = title
        self._expected = f" ({expected})" if expected else ""
        self._detail = ""

    def tell(self, detail: str) -> None:
        self._detail = f", {detail}"

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def first_line(self) -> str:
        return f"{self._title}{self._expected}"

    def line(self) -> str:
        return f"{self._title}: {int(self.seconds())} s{self._expected}{self._detail}"

    def __rich__(self) -> Text:
        return Text(self.line())


@contextmanager
def _in_log(console: Console, running: _Running) -> Iterator[None]:
    ended = Event()

    def tick() -> None:
        while not ended.wait(_LOG_SECONDS):
            console.print(Text(running.line()), soft_wrap=True)

    console.print(Text(running.first_line()), soft_wrap=True)
    ticker = Thread(target=tick, name=TICKER, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        ended.set()
        ticker.join()
