"""Makes slices final, one DAG for each pipeline: what the stream showed is computed again, complete and audited.

A slice is an interval of event time. When it is over and nothing more can come in time, it is due. `plan` takes all
slices that are due, those that were missed or failed included: gaps heal by themselves, a weekend in one run.
`recompute` computes their windows in one Spark job. `audit` judges them with the pipeline's checks. `publish` puts
those that passed in the place of the live rows, in one commit. `all_final` succeeds if nothing is left behind.

**On.** Unpause the DAG. There is a run for each slice; its partition is the slice that is over by then.

**Restate.** Three ways, and each takes exactly the slices that were asked for: *Backfill* in the UI or
`airflow backfill create --dag-id recompute_rolling_sum --from-date … --to-date … --reprocess-behavior completed`; clear
a run; or trigger one with the form below. They get a new version, whatever their state.

**Params** (of runs that are triggered by hand). `from` and `to`: an interval of event time; none of them means what is
due. `dry_run`: only show the plan; it is on unless you switch it off. `reason`: why; the ledger keeps it. `outdated`:
instead of an interval, all slices that an older definition has made.

**Connections.** `spark_default` says where Spark runs (client mode), `tideline_kafka` how Kafka is reached.

**Example.** Trigger it with `from` and `to`, look at the plan in the run's note, again with `dry_run` off and a reason.
By hand: `tideline plan rolling_sum`, `tideline restate rolling_sum --from T --to T --reason R --apply`.

**Recovery.** Nothing needs to be done: what a run has left undone, the next one does. Readers keep what they had.

**Triage.**
- `plan` fails, *it is not over* or *ingest has yet to land*: the slice cannot be closed yet. Is `stream_ingest` up?
- `audit` is red: it names slice, expectation and what was observed; its link *Data Docs* shows all. The slice is
  blocked, its live rows stay. Mend the data or the definition and restate it, or publish it anyway: `publish_blocked`.
- `audit` is tried again: it could not check, which says nothing about the data.
- `publish` is skipped, *another run has published it meanwhile*: that run's result stands.
- What a slice went through: the link *Slices*, or `tideline query "select * from ledger_rolling_sum"`.
"""

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, Param

from jobs.pipelines import PIPELINES
from tideline_airflow.defaults import ALERTS, DEFAULT_ARGS, IN_RECOMPUTE_POOL, TAG, deadline
from tideline_airflow.operators.recompute import AuditOperator, PlanOperator, PublishOperator, RecomputeOperator
from tideline_airflow.partitions import asset_of, timetable_of

_TIME = {"type": ["null", "string"], "format": "date-time"}
PARAMS = {
    "from": Param(None, title="From", description="Event time at which the first slice begins.", **_TIME),
    "to": Param(None, title="To", description="Event time at which the last slice ends.", **_TIME),
    "outdated": Param(False, type="boolean", title="Outdated", description="All slices of an older definition."),
    "dry_run": Param(True, type="boolean", title="Dry run", description="Only show the plan, change nothing."),
    "reason": Param(None, type=["null", "string"], title="Reason", description="Why; needed to restate."),
}

for pipeline in PIPELINES.values():
    with DAG(
        dag_id=pipeline.recompute_job,
        description=f"Makes slices of {pipeline.name} final: plan, recompute, audit, publish.",
        doc_md=__doc__,
        default_args=DEFAULT_ARGS,
        tags=[TAG, "recompute"],
        schedule=timetable_of(pipeline),
        catchup=False,
        max_active_runs=1,
        is_paused_upon_creation=True,
        params=PARAMS,
        deadline=deadline(30),
        **ALERTS,
    ):
        # Planned when there is a slot: a plan that would wait for one could take in less.
        plan = PlanOperator(task_id="plan", pipeline=pipeline.name, **IN_RECOMPUTE_POOL)
        # One Spark at a time, however many runs a backfill has under way.
        recompute = RecomputeOperator(
            task_id="recompute", pipeline=pipeline.name, max_active_tis_per_dag=1, **IN_RECOMPUTE_POOL
        )
        audit = AuditOperator(task_id="audit", pipeline=pipeline.name)
        # Slices that passed are published also where others did not.
        publish = PublishOperator(
            task_id="publish", pipeline=pipeline.name, trigger_rule="all_done", outlets=[asset_of(pipeline)]
        )
        # Takes no worker: it makes a run of which a slice is blocked a failed one.
        all_final = EmptyOperator(task_id="all_final")
        plan >> recompute >> audit >> publish >> all_final
        audit >> all_final
