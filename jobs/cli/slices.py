"""Final slices, through DAG runs: plan, restate, rollback."""

import json
from typing import Annotated, Any

import typer

from jobs.cli.shared import Apply, Format, Output, PipelineName, airflow, console_for_tables, pipeline_named, steps
from jobs.refusal import Refusal
from jobs.times import parse_time

# How long a command follows the run that it has started.
_RUN_SECONDS = 3600.0
_Reason = Annotated[str | None, typer.Option("--reason", help="Why you do it; the ledger stores this text.")]
_From = Annotated[str | None, typer.Option("--from", help="Event time at which the first slice begins, ISO 8601.")]
_To = Annotated[str | None, typer.Option("--to", help="Event time at which the last slice ends, ISO 8601.")]


def plan(name: PipelineName, from_: _From = None, to: _To = None, output: Format = Output.TABLE) -> None:
    """Show which slices a recompute would make final now, and why; --from and --to choose an interval."""
    _recompute_run(name, {"from": from_, "to": to, "dry_run": True}, output)


def restate(
    name: PipelineName,
    from_: _From = None,
    to: _To = None,
    outdated: Annotated[
        bool, typer.Option("--outdated", help="Instead of an interval: all slices of an older definition.")
    ] = False,
    reason: _Reason = None,
    do: Apply = False,
    output: Format = Output.TABLE,
) -> None:
    """Compute, audit and publish the slices of an interval again."""
    if not outdated and not (from_ and to):
        raise Refusal("no slices are given: add --from and --to, or --outdated")
    asked = {"from": from_, "to": to, "outdated": outdated, "dry_run": not do, "reason": reason}
    _recompute_run(name, asked, output)


def rollback(
    name: PipelineName,
    slice_: Annotated[str, typer.Option("--slice", help="Name of the slice, or a time in it, e.g. 20260131T120000Z.")],
    to_version: Annotated[int, typer.Option("--to-version", min=1, help="Which version to serve again.")],
    reason: _Reason = None,
    do: Apply = False,
    output: Format = Output.TABLE,
) -> None:
    """Serve an earlier version of a slice again. Its rows are published as a new version."""
    from jobs.pipelines.slices import slice_at

    pipeline = pipeline_named(name)
    conf = {
        "pipeline": pipeline.name,
        "slice": slice_at(pipeline, parse_time(slice_)).name,
        "to_version": to_version,
        "reason": reason,
        "apply": do,
    }
    answer = _dag_run("rollback_slice", conf, "roll_back")
    print(json.dumps(answer) if output is Output.JSON else "\n".join(answer["said"]))


def _recompute_run(name: str, asked: dict[str, Any], output: Output) -> None:
    from jobs.finality import plan_report

    for time_ in (asked["from"], asked["to"]):
        if time_:
            parse_time(time_)
    answer = _dag_run(pipeline_named(name).recompute_job, asked, "plan")
    if output is Output.JSON:
        print(json.dumps(answer))
        return
    if answer["slices"]:
        console_for_tables().print(plan_report.table(answer["slices"]))
    print("\n".join(answer["said"]))
    if not answer["dry_run"]:
        print("Done: the slices that passed the audit are final.")


def _dag_run(dag_id: str, conf: dict[str, Any], task_id: str) -> dict[str, Any]:
    """Start a DAG run, follow it to its end, and return the XCom of one of its tasks."""
    from jobs.airflow_api import dag_runs

    with airflow() as api, steps(dag_id) as step:
        if api is None:
            raise Refusal(
                "Airflow does not answer: start the embedded one with `tideline up`, or set AIRFLOW_API to another one"
            )
        run_id = dag_runs.run(api, dag_id, conf, step, _RUN_SECONDS)
        return dict(api.xcom(dag_id, run_id, task_id))
