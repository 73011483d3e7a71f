"""The task `plan`: it decides which slices a run makes final."""

from typing import TYPE_CHECKING, Any

from airflow.sdk import Context
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from jobs.finality.due import Request
from jobs.finality.run.folder import Plan, RunFolder
from jobs.pipelines.slices import Slice, slice_named
from jobs.refusal import Refusal
from tideline_airflow.links import SlicesLink
from tideline_airflow.listeners import RUN_NOTE, RUN_NOTE_LENGTH
from tideline_airflow.log_tables import as_text
from tideline_airflow.operators.batch import PipelineOperator
from tideline_airflow.refusals import fails_for_good_on
from tideline_airflow.scheduling.asked_slices import Asked, Outdated, asked
from tideline_airflow.scheduling.partitions import wait_until_over

if TYPE_CHECKING:
    from jobs.finality.planning import Planned

PLAN = "plan"
_LOG_WIDTH = 160
_LINES_IN_LOG = 500


class PlanOperator(PipelineOperator):
    """Decides which slices the run makes final, and writes the plan; a dry run only shows it."""

    operator_extra_links = (SlicesLink(),)

    def execute(self, context: Context) -> dict[str, Any]:
        """Show the plan in the log and on the run, and return it as JSON."""
        from jobs.finality import plan_report

        run = context["dag_run"]
        # Only a wrong request fails for good. A broker that does not answer may answer the next try.
        with fails_for_good_on(Refusal):
            ask = asked(self.definition, run, context["params"], lambda: self._slices_of_earlier_try(run.run_id))
        planned = self._plan(run.run_id, run.partition_key, ask)
        shown = {**plan_report.shown(planned), "dry_run": ask.dry_run}
        done = ["A dry run: nothing is changed."] if ask.dry_run else []
        shown["said"] = [*done, *shown["said"]]
        drawn = as_text(plan_report.table(shown["slices"][:_LINES_IN_LOG]), _LOG_WIDTH) if shown["slices"] else ""
        self.log.info("%s\n%s", "\n".join(shown["said"]), drawn)
        context["ti"].xcom_push(RUN_NOTE, plan_report.markdown(shown, RUN_NOTE_LENGTH))
        if shown["refused"] and not shown["slices"]:
            context["ti"].xcom_push(PLAN, shown)
            raise AirflowFailException("; ".join(f"slice {name}: {why}" for name, why in shown["refused"].items()))
        return shown

    def _plan(self, run_id: str, key: str | None, ask: Asked) -> "Planned":
        from jobs.broker import kafka
        from jobs.broker.clock import broker_clock
        from jobs.finality import planning

        settings = self.settings()
        with kafka.admin(settings.kafka) as client, broker_clock(client, settings.kafka) as clock:
            wait_until_over(self.definition, key, clock)
            planner, request = planning.Planner(lake=self.lake(), client=client, clock=clock), ask.request
            if isinstance(request, Outdated):
                request = Request(slices=planning.outdated(self.lake()), reason=request.reason)
            if ask.dry_run:
                return planner.preview(request)
            planner.await_ingest(run_id, request)
            return planner.plan(run_id, request)

    def _slices_of_earlier_try(self, run_id: str) -> list[Slice]:
        """The slices of an earlier try of this run, from the ledger."""
        from jobs.query.lake import Lake

        own = run_id.replace("'", "''")
        sql = f"SELECT DISTINCT slice FROM ledger_{self.pipeline} WHERE run = '{own}' AND state = 'recomputing'"
        names = Lake(self.lake().root).query(sql).column("slice").to_pylist()
        return [slice_named(self.definition, name) for name in sorted(names)]


def plan_or_skip(folder: RunFolder) -> Plan:
    """The plan of this run. The task is skipped after a dry run, or if nothing is due."""
    if not folder.path.exists():
        raise AirflowSkipException("this run has no plan: it was a dry run, or newer runs have taken its slices")
    plan = folder.plan()
    if not plan.work and not plan.unannounced:
        raise AirflowSkipException("no slice is due")
    return plan
