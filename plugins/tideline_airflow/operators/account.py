"""The account of a pipeline's final slices, as a task."""

from airflow.sdk import Context

from jobs.refusal import Refusal
from tideline_airflow.operators.batch import BatchJobOperator

# With this nice value, streams and publishes go first if processors are short. The account is slower then, but it ends.
_ACCOUNT_NICE = 5


class AccountOperator(BatchJobOperator):
    """Explains the differences between live and final rows, for slices that became final."""

    def execute(self, context: Context) -> None:
        """Run one Spark job for all slices that have no account yet."""
        run_id, link = context["dag_run"].run_id, context["ti"].log_url
        words = ("account", self.pipeline, "--run", run_id, "--link", link)
        self.submit(*words, events=self._events(), nice=_ACCOUNT_NICE)

    def _events(self) -> int | None:
        """How many events fall into windows of the slices without an account; None if the job will refuse."""
        from jobs.finality.account_inputs import events_due

        window = self.definition.window
        try:
            events = events_due(self.lake())
        except Refusal:
            # The job refuses for the same reason, and the task fails with its message.
            return None
        return events * -(-window.size_ms // window.slide_ms)
