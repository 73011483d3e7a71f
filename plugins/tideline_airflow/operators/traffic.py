"""Demo traffic as a task."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from airflow.sdk import BaseOperator, Context

from tideline_airflow.environment import of_child


class GenerateTrafficOperator(BaseOperator):
    """Runs `tideline generate` for each source, all at once; fails if one process fails."""

    template_fields: Sequence[str] = ("sources", "rate", "seconds", "late", "duplicate", "corrupt", "seed")

    def __init__(
        self,
        *,
        sources: Sequence[str] | str,
        rate: int | str,
        seconds: int | str,
        late: float | str,
        duplicate: float | str,
        corrupt: float | str,
        seed: int | str,
        **kwargs: Any,
    ) -> None:
        """All may be templates, or params of the DAG, which keep their types."""
        super().__init__(**kwargs)
        self.sources = sources
        self.rate = rate
        self.seconds = seconds
        self.late = late
        self.duplicate = duplicate
        self.corrupt = corrupt
        self.seed = seed
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def execute(self, context: Context) -> None:
        """Run all and wait for their end. Their output goes to the task's log."""
        try:
            codes = {source: process.wait() for source, process in self.start().items()}
        finally:
            self.on_kill()
        failed = {source: code for source, code in codes.items() if code}
        if failed:
            raise RuntimeError(f"traffic failed: exit codes {failed}; the reason is in the log above")

    def start(self) -> dict[str, "subprocess.Popen[bytes]"]:
        """Start one process for each source."""
        environment = of_child()
        for source in self.sources:
            self._running[source] = subprocess.Popen(self.command(source), env=environment)
        return self._running

    def command(self, source: str) -> list[str]:
        """The command for one source, without a shell."""
        count = int(self.rate) * int(self.seconds)
        options = {
            "--rate": self.rate,
            "--count": count,
            "--seed": self.seed,
            "--late": self.late,
            "--duplicate": self.duplicate,
            "--corrupt": self.corrupt,
        }
        return [sys.executable, "-m", "jobs", "generate", source, *(str(w) for pair in options.items() for w in pair)]

    def on_kill(self) -> None:
        """End the processes that still run."""
        for process in self._running.values():
            if process.poll() is None:
                process.terminate()
