"""Topics as code, as two tasks: one shows the plan, the other applies it."""

from typing import TYPE_CHECKING

from airflow.sdk import BaseOperator, Context

from jobs import pipelines
from jobs.refusal import Refusal
from tideline_airflow.hooks.kafka import KafkaHook
from tideline_airflow.listeners import RUN_NOTE, RUN_NOTE_LENGTH
from tideline_airflow.log_tables import as_text
from tideline_airflow.refusals import fails_for_good_on

if TYPE_CHECKING:
    from kafka import KafkaAdminClient

    from jobs.broker.topics import Step

_LOG_WIDTH = 140


class PlanTopicsOperator(BaseOperator):
    """Shows the steps that the topics need; fails for good if a step is refused."""

    def execute(self, context: Context) -> None:
        """Show the plan as a table in the log and on the run, and as rows in the XCom `plan`."""
        from jobs.broker import kafka

        with kafka.admin(KafkaHook().settings()) as client:
            self._act(client, self._plan(client, context))

    def _plan(self, client: "KafkaAdminClient", context: Context) -> "tuple[Step, ...]":
        from jobs.broker import topics

        steps = topics.survey(client, pipelines.topics())
        context["ti"].xcom_push("plan", [step.as_row() for step in steps])
        context["ti"].xcom_push(RUN_NOTE, topics.markdown(steps, RUN_NOTE_LENGTH))
        self.log.info("The plan:\n%s", as_text(topics.table(steps), _LOG_WIDTH))
        with fails_for_good_on(Refusal):
            topics.require_no_refusal(steps)
        return steps

    def _act(self, client: "KafkaAdminClient", steps: "tuple[Step, ...]") -> None:
        """Do nothing: this task only plans."""


class ApplyTopicsOperator(PlanTopicsOperator):
    """Plans again and applies the new plan, since the topics may have changed meanwhile. No plan loses data."""

    def _act(self, client: "KafkaAdminClient", steps: "tuple[Step, ...]") -> None:
        from jobs.broker import topics

        topics.apply(client, steps)
        self.log.info("All %d topics match their definitions.", len({step.topic.name for step in steps}))
