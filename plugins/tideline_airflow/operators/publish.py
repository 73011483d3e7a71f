"""The task `publish`: it publishes the slices that passed the audit."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from airflow.sdk import Context
from airflow.sdk.exceptions import AirflowSkipException

from jobs.finality.run.folder import RunFolder
from jobs.pipelines.slices import slice_named
from jobs.refusal import Refusal
from tideline_airflow.links import SlicesLink
from tideline_airflow.listeners import RUN_NOTE, RUN_NOTE_LENGTH
from tideline_airflow.operators.batch import PipelineOperator
from tideline_airflow.operators.plan import plan_or_skip
from tideline_airflow.refusals import fails_for_good_on
from tideline_airflow.scheduling.partitions import asset_of, key_of

if TYPE_CHECKING:
    from jobs.finality.publishing import Published


class PublishOperator(PipelineOperator):
    """Publishes the slices that passed, in one commit per group of touching slices; each slice is an asset event."""

    operator_extra_links = (SlicesLink(),)

    def execute(self, context: Context) -> dict[str, int]:
        """Return the new version of each published slice."""
        run_id = context["dag_run"].run_id
        folder = RunFolder.of(self.lake(), run_id)
        plan_or_skip(folder)
        if folder.verdicts() is None:
            raise AirflowSkipException("no slice of this run was audited: the next run plans these slices again")
        return self.tell(context, self.publish(run_id))

    def publish(self, run_id: str, approved: Mapping[str, str] | None = None) -> "Published":
        """Publish the slices that passed the audit, or that a person approves. A refusal fails the task for good."""
        from jobs.finality import publishing

        # If the broker does not answer, or a clock is wrong, the task is tried again: the cause may be gone by then.
        now_ms = self.broker_now_ms()
        with fails_for_good_on(Refusal):
            return publishing.publish(self.lake(), self.settings().kafka, run_id, approved, now_ms=now_ms)

    def tell(self, context: Context, published: "Published") -> dict[str, int]:
        """Report the result of the run, and add an asset event for each published slice."""
        words = [f"{published.sentence[:1].upper()}{published.sentence[1:]}; {published.messages:,} messages sent."]
        words += list(published.refused.values())
        words += [f"Slice {name} stays blocked: {'; '.join(why)}." for name, why in published.blocked.items()]
        self.log.info("%s", "\n".join(words))
        context["ti"].xcom_push(RUN_NOTE, "\n\n".join(words)[:RUN_NOTE_LENGTH])
        if not published.versions:
            # If the task succeeded without keys, Airflow would add an event for the run's own partition.
            raise AirflowSkipException(" ".join(words))
        self.add_events(context, sorted(published.versions))
        return dict(published.versions)

    def add_events(self, context: Context, slices: Iterable[str]) -> None:
        """Add an asset event for each of these slices."""
        asset = asset_of(self.definition)
        # Declared here, because some tasks get the pipeline from a form, only when they run.
        self.outlets = [asset]
        context["outlet_events"][asset].add_partitions([key_of(slice_named(self.definition, name)) for name in slices])
