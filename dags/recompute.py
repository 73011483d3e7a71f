"""Makes slices final, one DAG for each pipeline: it recomputes, audits and publishes them.

A slice is an interval of event time. It is over when no event for it can come in time any more, and due when `ingest`
has also landed all records that arrived until then. The run computes its windows from all landed events, while the
stream may have missed late ones.

- `plan` takes all slices that are due, also those that earlier runs missed or did not make final. So a run after a
  weekend without Airflow fills the whole gap.
- `recompute` computes their windows in one Spark job.
- `audit` judges the staged rows with the pipeline's checks.
- `publish` replaces live rows by the rows of the slices that passed. Adjacent slices are published in one commit.
- `all_final` makes the run fail if a slice was blocked.

**On.** Unpause the DAG. Airflow starts one run for each slice when the slice is over. The slice is the partition of its
run.

**Restate.** There are three ways. Each takes exactly the slices that were asked for, and gives them a new version,
whatever their state.
- *Backfill* in the UI, or
  `airflow backfill create --dag-id recompute_rolling_sum --from-date … --to-date … --reprocess-behavior completed`.
- Clear a run.
- Trigger a run with the form below.

**Params** (of runs that are triggered by hand). `from` and `to`: an interval of event time; without both, the run takes
the slices that are due. `dry_run`: only show the plan; it is on unless you switch it off. `reason`: why you restate the
slices; the ledger records it. `outdated`: instead of an interval, all slices that were computed with an older
definition.

**Connections.** `spark_default` says where Spark runs (client mode), `tideline_kafka` how Kafka is reached.

**Example.** Trigger it with `from` and `to`, and read the plan in the run's note. Trigger it again with `dry_run` off
and a reason. By hand: `tideline plan rolling_sum`, `tideline restate rolling_sum --from T --to T --reason R --apply`.

**Recovery.** Nothing needs to be done: the next run takes the slices that this run left. Until then readers keep the
rows that they had.

**Triage.**
- `plan` fails, *it is not over* or *ingest has not landed*: the slice cannot be closed yet. Is `stream_ingest` up?
- `audit` is red: it names the slice, the expectation and the observed value; its link *Data Docs* shows all. The slice
  is blocked, and its live rows stay. Correct the data or the definition and restate the slice. Or publish it anyway:
  `publish_blocked`.
- `audit` is tried again: the audit itself could not run. The data may be good or bad.
- `publish` is skipped, *another run has published it meanwhile*: the rows of that run stay.
- The history of a slice: the link *Slices*, or `tideline query "select * from ledger_rolling_sum"`.
"""

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, Param

from jobs.pipelines import PIPELINES
from tideline_airflow.operators.audit import AuditOperator
from tideline_airflow.operators.plan import PlanOperator
from tideline_airflow.operators.publish import PublishOperator
from tideline_airflow.operators.recompute import RecomputeOperator
from tideline_airflow.scheduling.defaults import IN_RECOMPUTE_POOL, TAG, scheduled
from tideline_airflow.scheduling.params import reason
from tideline_airflow.scheduling.partitions import asset_of, timetable_of

_TIME = {"type": ["null", "string"], "format": "date-time"}
PARAMS = {
    "from": Param(None, title="From", description="Event time at which the first slice begins.", **_TIME),
    "to": Param(None, title="To", description="Event time at which the last slice ends.", **_TIME),
    "outdated": Param(
        False,
        type="boolean",
        title="Outdated",
        description="Instead of an interval: all slices that were computed with an older definition.",
    ),
    "dry_run": Param(True, type="boolean", title="Dry run", description="Only show the plan, and change nothing."),
    "reason": reason(),
}

for pipeline in PIPELINES.values():
    with DAG(
        dag_id=pipeline.recompute_job,
        description=f"Makes slices of {pipeline.name} final: plan, recompute, audit, publish.",
        doc_md=__doc__,
        tags=[TAG, "recompute"],
        schedule=timetable_of(pipeline),
        is_paused_upon_creation=True,
        params=PARAMS,
        **scheduled(deadline_minutes=30),
    ):
        # The plan needs a slot of the pool, too. If it were made before the run gets a slot, it would miss the slices
        # that become over while the run waits.
        plan = PlanOperator(task_id="plan", pipeline=pipeline.name, **IN_RECOMPUTE_POOL)
        # One Spark job at a time, even if a backfill has several active runs.
        recompute = RecomputeOperator(
            task_id="recompute", pipeline=pipeline.name, max_active_tis_per_dag=1, **IN_RECOMPUTE_POOL
        )
        audit = AuditOperator(task_id="audit", pipeline=pipeline.name)
        # Slices that passed are published even if other slices of the run are blocked.
        publish = PublishOperator(
            task_id="publish", pipeline=pipeline.name, trigger_rule="all_done", outlets=[asset_of(pipeline)]
        )
        # It takes no worker. It makes the run fail if a slice is blocked.
        all_final = EmptyOperator(task_id="all_final")
        plan >> recompute >> audit >> publish >> all_final
        audit >> all_final
