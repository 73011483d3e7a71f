"""A streaming job as a task: it submits the driver through the Spark provider's connection, and supervises it.

The driver runs in a process session of its own, so it goes on whatever happens to Airflow. The next task finds it
through its control folder.
"""

import subprocess
import time
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowFailException

from jobs import pipelines
from jobs.control.epochs import LOOP_FAILURES, Attach, Beat, Epoch, Owner, Phase, Receipt, Wait, failures
from jobs.control.folder import Control
from jobs.control.incident import crash_loop_key
from jobs.control.incidents import Incidents
from jobs.control.lease import EPOCH_VARIABLE, LOG_VARIABLE
from jobs.control.room import Room
from jobs.scratch import new_scratch
from jobs.settings import Settings
from jobs.upkeep.logs import OLDER_SUFFIX
from tideline_airflow.links import DriverLogLink, SparkUiLink, StreamLink, driver_logs
from tideline_airflow.notifiers.incident import AlreadyTold
from tideline_airflow.submission import submission
from tideline_airflow.triggers.streaming import StreamTrigger, ask_to_stop_once

_KEPT_LOGS = 20


class StreamFailedError(Exception):
    """The driver failed; the text gives the cause. The next try starts another driver when it is time."""


class CrashLoopError(AlreadyTold, AirflowFailException):
    """The driver fails again and again, and an incident is open for it. This run is not tried again."""


class StreamingJobOperator(BaseOperator):
    """Keeps one streaming job running: it submits or finds the driver, then waits in the triggerer, without a worker.

    Kafka's settings reach the driver in its environment, never as arguments.
    """

    operator_extra_links = (StreamLink(), DriverLogLink(), SparkUiLink())

    def __init__(self, *, job: str, **kwargs: Any) -> None:
        """Connections, settings and jars are looked up when the task runs."""
        # The control folder decides how long to wait before the next start, whichever try or run makes it. So Airflow
        # itself waits only 1 s between two tries.
        once_more: dict[str, Any] = {"retries": LOOP_FAILURES, "retry_delay": timedelta(seconds=1)}
        super().__init__(**{**once_more, **kwargs})
        self.job = job
        self._launched: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def execute(self, context: Context) -> None:
        """Follow the running driver, or start a driver, or wait until a start is allowed."""
        self._await_room()
        self._go_on(self._control())

    def _go_on(self, control: Control) -> NoReturn:
        step = control.next_step()
        if isinstance(step, Attach):
            stopping = control.stop_of(step.epoch) is not None
            what = (
                "is stopping: the next driver starts after its end" if stopping else "runs already: the task follows it"
            )
            self.log.info("epoch %d of %s %s", step.epoch, self.job, what)
            self._follow(step.epoch, then_start=stopping)
        if isinstance(step, Wait):
            self.log.info(
                "%s has failed %d times in a row; the next start is in %.0f s (now: `tideline streams restart %s`)",
                *(self.job, step.failures, step.until - time.time(), self.job),
            )
            self._follow(None)
        self._follow(self._launch(control))

    def resume(self, context: Context, event: dict[str, Any], then_start: bool = False) -> dict[str, Any]:
        """Called when the trigger fires. The driver's receipt decides the next step."""
        self._await_room()
        control = self._control()
        control.write_missing_receipt()
        epoch = control.epoch(event["epoch"]) if event["epoch"] else None
        if epoch is None or epoch.receipt is None:
            self._go_on(control)
        if not epoch.receipt.clean:
            self._fail(control, epoch, epoch.receipt)
        Incidents.of(Settings.from_env().lake_root).close(crash_loop_key(self.job), epoch.receipt.cause)
        self.log.info("epoch %d of %s ended cleanly: %s", epoch.number, self.job, epoch.receipt.cause)
        if then_start:
            self._go_on(control)
        return {"epoch": epoch.number, **asdict(epoch.receipt)}

    def on_kill(self) -> None:
        """If the task is killed while it starts a driver: ask that driver to stop, or end the epoch if none started."""
        if self._launched is not None and self._process is None:
            killed = Receipt(time=time.time(), clean=True, cause="the task was ended before it had started a driver")
            self._control().end(self._launched, killed)
        elif self._launched is not None:
            ask_to_stop_once(self._control(), self._launched)

    def _control(self) -> Control:
        return Control.of(Settings.from_env().lake_root, self.job)

    def _await_room(self) -> None:
        """Wait if the disk is full: a live driver cannot write a heartbeat then, and another driver would fail too."""
        if Room.of(Settings.from_env().lake_root).is_short():
            self.log.warning("the disk of the lake is full: the task waits until enough space is free")
            self._follow(None)

    def _follow(self, epoch: int | None, *, then_start: bool = False) -> NoReturn:
        trigger = StreamTrigger(lake_root=str(Settings.from_env().lake_root), job=self.job, epoch=epoch)
        self.defer(trigger=trigger, method_name="resume", kwargs={"then_start": then_start})

    def _fail(self, control: Control, epoch: Epoch, receipt: Receipt) -> NoReturn:
        failed = failures(control.history())
        text = f"stream {self.job}, epoch {epoch.number}: {receipt.cause} (driver's log: {epoch.log or 'none'})"
        if failed < LOOP_FAILURES:
            raise StreamFailedError(text)
        way_out = f"remove the cause, then run `tideline streams restart {self.job}`"
        told = f"stream {self.job} fails again and again: {receipt.cause}; {way_out}"
        link = StreamLink().get_link(self, ti_key=None)
        Incidents.of(Settings.from_env().lake_root).open(crash_loop_key(self.job), told, link=link)
        raise CrashLoopError(f"{text}. It has failed {failed} times in a row: {way_out}")

    def _launch(self, control: Control) -> int:
        """Submit a driver for the next epoch; its log is a file beside the tasks' logs."""
        epoch = self._launched = control.reserve(Owner.this_process(), launched=True)
        try:
            log = _new_log(self.job, epoch)
            self._process = self._submit(epoch, log)
        except Exception as error:
            self.log.exception("epoch %d could not be started", epoch)
            cause = f"the driver could not be started: {type(error).__name__}: {error}"
            receipt = Receipt(time=time.time(), clean=False, cause=cause)
            control.end(epoch, receipt)
            self._fail(control, control.epoch(epoch), receipt)
        pid = self._process.pid
        control.beat(epoch, Beat(time=time.time(), owner=Owner.of(pid), phase=Phase.LAUNCHED, log=str(log)))
        self.log.info("started epoch %d of %s: process %d, log %s", epoch, self.job, pid, log)
        return epoch

    def _submit(self, epoch: int, log: Path) -> "subprocess.Popen[bytes]":
        arguments = [self.job] if self.job == pipelines.INGEST else ["live", self.job]
        # Opened in append mode: `upkeep` empties a large log while the driver has it open, and the next line must go to
        # the new end.
        with new_scratch(Settings.from_env().scratch) as scratch, log.open("ab") as output:
            command, environment = submission(arguments, scratch)
            return subprocess.Popen(
                command,
                env={**environment, EPOCH_VARIABLE: str(epoch), LOG_VARIABLE: str(log)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[scratch.lock],
            )


def _new_log(job: str, epoch: int) -> Path:
    """A log file for the driver of an epoch; the oldest logs of the job are deleted."""
    folder = driver_logs(job)
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.glob("*.log"))[: -_KEPT_LOGS + 1]:
        old.unlink()
        old.with_name(old.name + OLDER_SUFFIX).unlink(missing_ok=True)
    return folder / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-epoch-{epoch}.log"
