"""The control of streams, and the reset of their checkpoints, as tasks."""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, Context

from jobs.refusal import Refusal
from jobs.settings import Settings
from tideline_airflow.hooks.airflow import AirflowHook
from tideline_airflow.hooks.kafka import KafkaHook
from tideline_airflow.listeners import RUN_NOTE, RUN_NOTE_LENGTH
from tideline_airflow.log_tables import as_text
from tideline_airflow.refusals import fails_for_good_on

if TYPE_CHECKING:
    from jobs.streaming.fleet import Fleet

_LOG_WIDTH = 160


class Action(StrEnum):
    """An action on streams."""

    STATUS = "status"
    START = "start"
    STOP = "stop"
    DRAIN_AND_STOP = "drain-and-stop"
    RESTART = "restart"


class ControlStreamsOperator(BaseOperator):
    """Does one action with several streams at once, waits until it is done, and shows their state."""

    template_fields: Sequence[str] = ("action", "jobs", "seconds", "by")

    def __init__(
        self,
        *,
        action: str,
        jobs: Sequence[str] | str,
        seconds: int | str | None = None,
        by: str = "the DAG control_streams",
        **kwargs: Any,
    ) -> None:
        """All may be templates, or params of the DAG, which keep their types."""
        super().__init__(**kwargs)
        self.action = action
        self.jobs = jobs
        self.seconds = seconds
        self.by = by

    def execute(self, context: Context) -> "list[dict[str, Any]]":
        """Return the state of the streams afterwards, as rows."""
        from jobs.streaming import fleet

        jobs = fleet.known_jobs(self.jobs)
        with AirflowHook().get_conn() as api:
            streams = fleet.Fleet(lake_root=Settings.from_env().lake_root, api=api, report=self.log.info)
            self._act(streams, jobs)
            states = streams.status(jobs)
        self.log.info("Streams:\n%s", as_text(fleet.table(states), _LOG_WIDTH))
        context["ti"].xcom_push(RUN_NOTE, "; ".join(f"{state.job}: {state.state}" for state in states))
        return fleet.as_rows(states)

    def _act(self, streams: "Fleet", jobs: Sequence[str]) -> None:
        seconds = float(self.seconds) if self.seconds else None
        match Action(self.action):
            case Action.START:
                streams.start(jobs, by=self.by)
            case Action.STOP:
                streams.stop(jobs, by=self.by, seconds=seconds)
            case Action.DRAIN_AND_STOP:
                streams.stop(jobs, by=self.by, seconds=seconds, drain=True)
            case Action.RESTART:
                streams.restart(jobs, by=self.by, seconds=seconds)
            case Action.STATUS:
                pass


class ResetStreamOperator(BaseOperator):
    """Shows the changes that a reset of a stream makes; with `apply` it resets. Refused while the driver lives."""

    template_fields: Sequence[str] = ("job", "to", "timestamp", "sources", "apply")

    def __init__(
        self,
        *,
        job: str,
        to: str,
        timestamp: str | None = None,
        sources: Sequence[str] | str = (),
        apply: bool | str = False,
        **kwargs: Any,
    ) -> None:
        """All may be templates, or params of the DAG, which keep their types."""
        super().__init__(**kwargs)
        self.job = job
        self.to = to
        self.timestamp = timestamp
        self.sources = sources
        self.apply = apply

    def execute(self, context: Context) -> "list[dict[str, Any]]":
        """Show the plan as a table in the log, and its effects on the run; return it as rows."""
        from jobs.broker import kafka
        from jobs.streaming import reset
        from jobs.streaming.reset_plan import Request

        settings = replace(Settings.from_env(), kafka=KafkaHook().settings())
        with fails_for_good_on(Refusal):
            request = Request.of(self.job, self.to, self.timestamp, self.sources)
            with kafka.admin(settings.kafka) as client:
                planned = (reset.apply if self.apply else reset.plan)(settings, client, request)
        dry = "Nothing is changed: this was a dry run. Set apply to reset the stream."
        done = "The reset is done: start the stream now." if self.apply else dry
        self.log.info("%s\n%s\n%s", as_text(planned.table(), _LOG_WIDTH), "\n".join(planned.effects()), done)
        context["ti"].xcom_push(RUN_NOTE, "\n\n".join([done, *planned.effects()])[:RUN_NOTE_LENGTH])
        return planned.as_rows()
