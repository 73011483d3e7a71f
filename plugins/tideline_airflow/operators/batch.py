"""A batch job as a task. Its driver ends with the task at the latest, and the driver's output is the task's log."""

import os
import re
import subprocess
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from jobs.control.room import Room
from jobs.finality.run.tries import TASK_VARIABLE, describe_process
from jobs.pipelines import PIPELINES
from jobs.pipelines.pipeline import Pipeline
from jobs.scratch import new_scratch
from jobs.settings import Settings
from tideline_airflow.hooks.kafka import KafkaHook
from tideline_airflow.submission import submission
from tideline_airflow.triggers.room import RoomTrigger

if TYPE_CHECKING:
    from jobs.lake.pipeline_lake import PipelineLake

# Up to this many events, most of a job's time is Spark's own start.
_BRIEF_EVENTS = 500_000
# The prefix with which `tideline` prints a refusal.
_REFUSAL = "tideline: "
# Java prints this at every start of Spark.
_NOISE = ("WARNING: Using incubator modules: jdk.incubator.vector",)
_KEPT_LINES = 30
_END_SECONDS = 4.0
_PIPES: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>[A-Z]+) ")


class DriverError(AirflowException):
    """A driver ended before its work was done, and gave no reason that a person could act on."""


class PipelineOperator(BaseOperator):
    """A task about one pipeline."""

    def __init__(self, *, pipeline: str, **kwargs: Any) -> None:
        """The definition is looked up when the task runs."""
        super().__init__(**kwargs)
        self.pipeline = pipeline

    def pre_execute(self, context: Context) -> None:
        """Begin when the disk of the lake has room. A task that waits for room holds no worker slot."""
        lake_root = Settings.from_env().lake_root
        if Room.of(lake_root).is_short():
            self.log.warning("the disk of the lake is full: the task waits until enough space is free")
            self.defer(trigger=RoomTrigger(lake_root=str(lake_root)), method_name="go_on")

    def go_on(self, context: Context, event: dict[str, Any]) -> Any:
        """Execute the task. The trigger calls this when there is room."""
        return self.execute(context)

    @property
    def definition(self) -> Pipeline:
        """The pipeline's definition."""
        if self.pipeline not in PIPELINES:
            raise AirflowFailException(f"there is no pipeline {self.pipeline!r}: choose one of {', '.join(PIPELINES)}")
        return PIPELINES[self.pipeline]

    def lake(self) -> "PipelineLake":
        """The pipeline's part of the lake."""
        from jobs.lake.pipeline_lake import PipelineLake

        return PipelineLake(Settings.from_env().lake_root, self.definition)

    def settings(self) -> Settings:
        """The settings of the environment, with Kafka's from the connection."""
        return replace(Settings.from_env(), kafka=KafkaHook().settings())

    def broker_now_ms(self) -> int:
        """The broker's time. Refused if the broker does not answer, or if this machine's clock is wrong."""
        from jobs.broker.clock import broker_now_ms

        return broker_now_ms(self.settings().kafka)


class BatchJobOperator(PipelineOperator):
    """Runs a job of `python -m jobs` under `spark-submit`, and waits for its end."""

    _process: "subprocess.Popen[str] | None" = None
    _killed = False

    def submit(self, *arguments: str, events: int | None = None, nice: int = 0) -> None:
        """Run a driver to its end. A refusal fails the task for good; the task is tried again after any other failure.

        ``events``: how many events the job reads, if known. With few, the driver is set to start quickly, not to run
        quickly. ``nice``: added to the driver's nice value, so that other processes of this machine go first.
        """
        with new_scratch(Settings.from_env().scratch) as scratch:
            command, environment = submission(arguments, scratch, brief=events is not None and events <= _BRIEF_EVENTS)
            # If the task is killed hard, it cannot end its driver. So the driver watches the task's process.
            environment[TASK_VARIABLE] = describe_process()
            more: dict[str, Any] = {"env": environment, "pass_fds": [scratch.lock], "text": True, "errors": "replace"}
            # The driver is in the task's own process group, so a signal that ends the group ends both.
            with subprocess.Popen(command, **_PIPES, **more) as self._process:
                # The processes that the driver starts inherit its nice value.
                os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)
                last = self._log_output(self._process)
        if self._process.returncode == 0:
            return
        if self._killed:
            raise AirflowFailException("the task was ended, and its driver with it")
        words = next((line for line in reversed(last) if line.startswith(_REFUSAL)), None)
        if words:
            raise AirflowFailException(words.removeprefix(_REFUSAL))
        end = f"ended with exit code {self._process.returncode}"
        line = f"; the last line of its log: {last[-1]}" if last else ""
        raise DriverError(f"the driver of {' '.join(arguments[:2])} {end}{line}")

    def _log_output(self, process: "subprocess.Popen[str]") -> "deque[str]":
        last: deque[str] = deque(maxlen=_KEPT_LINES)
        for line in map(str.rstrip, process.stdout or ()):
            if not line or line in _NOISE:
                continue
            last.append(line)
            stamp = _STAMP.match(line)
            say = self.log.warning if stamp and stamp["level"] not in ("INFO", "DEBUG") else self.log.info
            say("%s", line[stamp.end() :] if stamp else line)
        return last

    def on_kill(self) -> None:
        """End the driver with the task; no other driver is started."""
        self._killed, process = True, self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
