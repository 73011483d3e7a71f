"""The four tasks that make slices final: plan, recompute, audit, publish."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import Context
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from jobs.control.room import Room
from jobs.finality.due import Request
from jobs.finality.run.folder import Plan, RunFolder
from jobs.finality.run.isolation import ComputeError, isolate
from jobs.finality.run.tries import StagedSlice, Try
from jobs.pipelines.slices import Slice, slice_named
from jobs.refusal import Refusal
from tideline_airflow.links import DataDocsLink, SlicesLink
from tideline_airflow.listeners import RUN_NOTE, RUN_NOTE_LENGTH
from tideline_airflow.log_tables import as_text
from tideline_airflow.notifiers.incident import AlreadyTold
from tideline_airflow.operators.batch import BatchJobOperator, DriverError, PipelineOperator
from tideline_airflow.refusals import fails_for_good_on
from tideline_airflow.scheduling.asked_slices import Asked, Outdated, asked
from tideline_airflow.scheduling.partitions import asset_of, key_of, wait_until_over

if TYPE_CHECKING:
    from jobs.finality.planning import Planned
    from jobs.finality.publishing import Published

PLAN = "plan"
_LOG_WIDTH = 160
_LINES_IN_LOG = 500


class BlockedError(AlreadyTold, AirflowFailException):
    """Checks failed: these slices are not published. The audit has opened an incident for each of them."""


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


class RecomputeOperator(BatchJobOperator):
    """Computes the windows of all planned slices in one Spark job; without windows it starts no job.

    If the job fails in the task's last try, the slices are halved until those are found that fail alone. These will be
    blocked; the others become final.
    """

    def execute(self, context: Context) -> None:
        """Stage rows, after removing the rows of earlier tries of this task."""
        run_id, task = context["dag_run"].run_id, context["ti"]
        folder = RunFolder.of(self.lake(), run_id)
        plan = _plan_or_skip(folder)
        folder.begin(plan)
        staged = {work.slice: StagedSlice() for work in plan.work if not work.window_events}
        if not plan.has_windows:
            folder.keep_staged(staged)
            self.log.info("The %d planned slices have no windows, so no Spark job is started.", len(plan.work))
            return
        busy = plan.only(name for name in plan.names if name not in staged)
        if task.try_number <= task.max_tries:
            # The failure may be temporary, so the next try takes all slices again.
            folder.keep_staged(staged | self._compute(folder, busy))
            return
        try:
            found = isolate(busy.names, lambda group: self._compute_group(folder, busy.only(group)))
        except ComputeError as error:
            raise DriverError(f"the cause is probably outside of the slices, so none is blocked: {error}") from error
        for result in found.results:
            staged |= result
        folder.keep_staged(staged, found.failing)
        for name, why in found.failing.items():
            self.log.error("slice %s cannot be computed: %s", name, why)

    def _compute_group(self, folder: RunFolder, part: Plan) -> dict[str, StagedSlice]:
        try:
            return self._compute(folder, part)
        except DriverError as error:
            if Room.of(self.lake().root).is_short():
                # The full disk is the cause. Smaller groups would find room, so a slice would be blamed wrongly.
                raise
            self.log.warning("a Spark job for %d slices failed: %s", len(part.work), error)
            raise ComputeError(str(error)) from error

    def _compute(self, folder: RunFolder, part: Plan) -> dict[str, StagedSlice]:
        own = Try.begin(folder.path, part.names)
        events = sum(work.window_events for work in part.work)
        try:
            self.submit("recompute", self.pipeline, "--run", part.run, "--try", own.name, events=events)
            return own.result()
        except BaseException:
            own.discard()
            raise


class AuditOperator(BatchJobOperator):
    """Judges staged rows by the pipeline's checks: few rows here, many by Spark. A slice that fails is blocked."""

    operator_extra_links = (DataDocsLink(), SlicesLink())

    def execute(self, context: Context) -> dict[str, list[str]]:
        """Return the failed checks of each slice, warnings too."""
        run_id = context["dag_run"].run_id
        with fails_for_good_on(Refusal):
            self._examine(run_id, DataDocsLink.address(context["dag"].dag_id, run_id))
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

    def _examine(self, run_id: str, link: str) -> None:
        from jobs.finality import auditing
        from jobs.quality.audit import SMALL_ROWS

        lake = self.lake()
        rows = auditing.staged_rows(lake, run_id)
        if rows <= SMALL_ROWS:
            self.log.info("%s staged rows are audited in this task, without Spark.", f"{rows:,}")
            auditing.examine(lake, run_id, link=link)
        else:
            self.log.info("%s staged rows are audited by a Spark job.", f"{rows:,}")
            self.submit("audit", self.pipeline, "--run", run_id, "--link", link)


class PublishOperator(PipelineOperator):
    """Publishes the slices that passed, in one commit per group of touching slices; each slice is an asset event."""

    operator_extra_links = (SlicesLink(),)

    def execute(self, context: Context) -> dict[str, int]:
        """Return the new version of each published slice."""
        run_id = context["dag_run"].run_id
        folder = RunFolder.of(self.lake(), run_id)
        _plan_or_skip(folder)
        if folder.verdicts() is None:
            raise AirflowSkipException("no slice of this run was audited: the next run plans these slices again")
        return self.tell(context, self.publish(run_id))

    def publish(self, run_id: str, approved: Mapping[str, str] | None = None) -> "Published":
        """Publish the slices that passed the audit, or that a person approves. A refusal fails the task for good."""
        from jobs.broker.clock import broker_now_ms
        from jobs.finality import publishing

        # If the broker does not answer, or a clock is wrong, the task is tried again: the cause may be gone by then.
        kafka = self.settings().kafka
        now_ms = broker_now_ms(kafka)
        with fails_for_good_on(Refusal):
            return publishing.publish(self.lake(), kafka, run_id, approved, now_ms=now_ms)

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


def _plan_or_skip(folder: RunFolder) -> Plan:
    """The plan of this run. The task is skipped after a dry run, or if nothing is due."""
    if not folder.path.exists():
        raise AirflowSkipException("this run has no plan: it was a dry run, or newer runs have taken its slices")
    plan = folder.plan()
    if not plan.work and not plan.unannounced:
        raise AirflowSkipException("no slice is due")
    return plan
