"""The check of served rows, as a task."""

from airflow.sdk import Context
from airflow.sdk.exceptions import AirflowFailException

from tideline_airflow.links import DataDocsLink, SlicesLink
from tideline_airflow.listeners import RUN_NOTE, RUN_NOTE_LENGTH
from tideline_airflow.notifiers.incident import AlreadyTold
from tideline_airflow.operators.batch import PipelineOperator


class ServedError(AlreadyTold, AirflowFailException):
    """The served rows fail their checks. The check has opened an incident."""


class CheckOperator(PipelineOperator):
    """Judges the rows that a pipeline serves: live windows, their freshness, and the checksums of final slices."""

    operator_extra_links = (DataDocsLink(), SlicesLink())

    def execute(self, context: Context) -> None:
        """Check, and fail with a sentence about the failed checks."""
        from jobs.finality import checking

        run_id = context["dag_run"].run_id
        link = DataDocsLink.address(context["dag"].dag_id, run_id)
        verdict = checking.check(self.lake(), run_id, link=link)
        context["ti"].xcom_push(RUN_NOTE, (verdict.sentence or "All checks passed.")[:RUN_NOTE_LENGTH])
        if not verdict.passed:
            raise ServedError(f"the rows that {self.pipeline} serves fail their checks: {verdict.sentence}")
        if verdict.failures:
            self.log.warning("Warnings: %s", verdict.sentence)
