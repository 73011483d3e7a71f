"""The task `audit`: it judges the staged rows, and blocks the slices that fail."""

from airflow.sdk import Context
from airflow.sdk.exceptions import AirflowFailException

from jobs.finality.run.folder import RunFolder
from jobs.refusal import Refusal
from tideline_airflow.links import DataDocsLink, SlicesLink
from tideline_airflow.listeners import RUN_NOTE, RUN_NOTE_LENGTH
from tideline_airflow.notifiers.incident import AlreadyTold
from tideline_airflow.operators.batch import BatchJobOperator
from tideline_airflow.refusals import fails_for_good_on


class BlockedError(AlreadyTold, AirflowFailException):
    """Checks failed: these slices are not published. The audit has opened an incident for each of them."""


class AuditOperator(BatchJobOperator):
    """Judges staged rows by the pipeline's checks: few rows here, many by Spark. A slice that fails is blocked."""

    operator_extra_links = (DataDocsLink(), SlicesLink())

    def execute(self, context: Context) -> dict[str, list[str]]:
        """Return the failed checks of each slice, warnings too."""
        run_id = context["dag_run"].run_id
        # If the broker does not answer, or a clock is wrong, the task is tried again: the cause may be gone by then.
        now_ms = self.broker_now_ms()
        with fails_for_good_on(Refusal):
            self._examine(run_id, now_ms, DataDocsLink.address(context["dag"].dag_id, run_id))
        verdicts = RunFolder.of(self.lake(), run_id).verdicts() or {}
        shown = {name: [failure["sentence"] for failure in verdict["failures"]] for name, verdict in verdicts.items()}
        for name, failures in shown.items():
            if failures and verdicts[name]["passed"]:
                self.log.warning("slice %s passes with warnings: %s", name, "; ".join(failures))
        blocked = {name: shown[name] for name, verdict in verdicts.items() if not verdict["passed"]}
        if blocked:
            words = ". ".join(f"Slice {name} is blocked: {'; '.join(failures)}" for name, failures in blocked.items())
            context["ti"].xcom_push(RUN_NOTE, words[:RUN_NOTE_LENGTH])
            raise BlockedError(words)
        self.log.info("%d slices passed the audit.", len(verdicts))
        return {name: failures for name, failures in shown.items() if failures}

    def _examine(self, run_id: str, now_ms: int, link: str) -> None:
        from jobs.finality import auditing
        from jobs.quality.audit import SMALL_ROWS

        lake = self.lake()
        rows = auditing.staged_rows(lake, run_id)
        if rows <= SMALL_ROWS:
            self.log.info("%s staged rows are audited in this task, without Spark.", f"{rows:,}")
            auditing.examine(lake, run_id, now_ms=now_ms, link=link)
        else:
            self.log.info("%s staged rows are audited by a Spark job.", f"{rows:,}")
            self.submit("audit", self.pipeline, "--run", run_id, "--now-ms", str(now_ms), "--link", link)
