"""`tideline demo`: start everything, feed it with made-up traffic, and show how live windows become final."""

import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.console import Console
from rich.table import Table

from jobs.airflow_api.client import AirflowApi
from jobs.pipelines import INGEST, PIPELINES
from jobs.pipelines.layout import dag_id_of
from jobs.query.answers import as_text
from jobs.query.lake import Lake
from jobs.refusal import Refusal
from local.platform.report import addresses
from local.platform.stack import Stack
from local.steps import Tell, step, steps

TOPICS, TRAFFIC = "provision_topics", "generate_demo_traffic"
SHOWN = ("rolling_sum", "word_count")
FINAL = SHOWN[0]
STREAMS = (INGEST, *SHOWN)
TRAFFIC_CONF: Mapping[str, Any] = {"sources": ["numbers", "lines"], "rate": 200, "seconds": 6 * 3600}
_PARSED_SECONDS = 120
_TOPICS_SECONDS = 180
_WINDOWS_SECONDS = 900
_FINAL_SECONDS = 900
# With this many events, a slice contains regular traffic, and not only late events.
_FINAL_EVENTS = 500
_RECENT = timedelta(minutes=10)
# A current window of one minute began up to a minute ago, and its stream may be a little behind.
_FRESH = timedelta(minutes=3)


def run(stack: Stack, console: Console) -> None:
    """Start the parts that do not run yet, wait for windows, and show them, the addresses and the next commands."""
    with steps(console, "Platform") as report:
        stack.up(report)
    with stack.airflow.api() as api:
        show(api, Lake(stack.settings.jobs.lake_root), console)
    console.print(addresses(stack))
    more = "select * from word_count_total order by occurrences desc limit 5"
    console.print(f'More: [bold].venv/bin/tideline query "{more}"[/bold]', soft_wrap=True)
    console.print("Stop: [bold]make down[/bold]")


def show(api: AirflowApi, lake: Lake, console: Console) -> None:
    """Start topics, streams and traffic on a platform that runs, wait for windows, live and final, and show them."""
    with step(console, "DAGs are read", "a few seconds") as tell:
        batch = [dag for name in SHOWN for dag in (PIPELINES[name].recompute_job, PIPELINES[name].account_job)]
        wait_for_dags(api, {TOPICS, TRAFFIC, *map(dag_id_of, STREAMS), *batch}, tell)
    with step(console, "Topics", "about 10 s"):
        provision(api)
    with step(console, "Streams and traffic"):
        _start(api)
    with step(console, "Live windows", "about 40 s on two cores") as tell:
        _wait_for_windows(api, lake, tell)
    for name in SHOWN:
        console.print(_newest(lake, name))
    with step(console, "Final slice", "one to two minutes on two cores") as tell:
        _wait_for_final(api, lake, tell)
    with step(console, "Account of live and final", "about a minute on two cores") as tell:
        _account(api, lake, tell)
    _start_the_rest(api)
    console.print(_slices(lake))
    console.print(_drift_line(lake), highlight=False)


def wait_for_dags(api: AirflowApi, wanted: set[str], tell: Tell, seconds: float = _PARSED_SECONDS) -> None:
    """Wait until Airflow has read these DAGs."""
    deadline = time.monotonic() + seconds
    while missing := wanted - api.dags().keys():
        tell(f"{len(missing)} of {len(wanted)} are not read yet")
        if time.monotonic() > deadline:
            why = api.import_errors() or "see the log of the DAG processor"
            raise Refusal(f"Airflow does not show the DAGs {sorted(missing)}: {why}")
        time.sleep(1)


def provision(api: AirflowApi, seconds: float = _TOPICS_SECONDS) -> None:
    """Let Airflow create the topics."""
    api.unpause(TOPICS)
    run_id = api.trigger(TOPICS)
    if api.wait_for_run(TOPICS, run_id, seconds) != "success":
        raise Refusal(f"the topics could not be provisioned: {_last_words(api, TOPICS, run_id)}")


def _start(api: AirflowApi) -> None:
    """Unpause the DAGs; a stream runs while its DAG is not paused. Start traffic, unless a run already sends it."""
    for job in STREAMS:
        api.unpause(dag_id_of(job))
    api.unpause(PIPELINES[FINAL].recompute_job)
    api.unpause(TRAFFIC)
    if not any(sent["state"] in ("queued", "running") for sent in api.runs(TRAFFIC)):
        api.trigger(TRAFFIC, TRAFFIC_CONF)


def _wait_for_windows(api: AirflowApi, lake: Lake, tell: Tell) -> None:
    began = datetime.now(UTC)
    deadline = time.monotonic() + _WINDOWS_SECONDS
    while not all((counts := {name: _fresh_windows(lake, name, began) for name in SHOWN}).values()):
        tell("waiting for " + ", ".join(name for name, count in counts.items() if not count))
        _refuse_failed_streams(api, began)
        if time.monotonic() > deadline:
            last_lines = "\n".join(_stream_says(api, job) for job in STREAMS)
            raise Refusal(
                f"no windows after {_WINDOWS_SECONDS} s; the last lines of the logs of the streams:\n{last_lines}"
            )
        time.sleep(1)


def _fresh_windows(lake: Lake, name: str, began: datetime) -> int:
    """The number of windows that fill now; 0 before the stream has made its table."""
    since = (began - _FRESH).isoformat()
    sql = f"SELECT DISTINCT window_start FROM {name} WHERE window_start > TIMESTAMPTZ '{since}'"
    with suppress(Refusal):
        return int(lake.query(sql).num_rows)
    return 0


def _wait_for_final(api: AirflowApi, lake: Lake, tell: Tell) -> None:
    """Wait for a final slice. A slice is over about a minute after its end, and final when the next run has ended."""
    began = datetime.now(UTC)
    deadline = time.monotonic() + _FINAL_SECONDS
    dag_id = PIPELINES[FINAL].recompute_job
    while not _newest_final(lake, began):
        states = ", ".join(f"{count} {state}" for state, count in _states(lake, began - _FRESH).items())
        tell(f"a slice is over a minute after its end; {states or 'none is over yet'}")
        _refuse_failed_streams(api, began)
        if time.monotonic() > deadline:
            runs = api.runs(dag_id)
            last_lines = _last_words(api, dag_id, runs[0]["dag_run_id"]) if runs else "it has no run"
            raise Refusal(
                f"no slice is final after {_FINAL_SECONDS} s; the last lines of the log of {dag_id}:\n{last_lines}"
            )
        time.sleep(1)


def _newest_final(lake: Lake, began: datetime) -> str | None:
    """The newest final slice with traffic of the last minutes."""
    sql = f"""SELECT max(slice) AS slice FROM slices_{FINAL} WHERE state = 'final' AND events >= {_FINAL_EVENTS}
        AND slice_end > TIMESTAMPTZ '{(began - _RECENT).isoformat()}'"""
    with suppress(Refusal):
        (row,) = lake.query(sql).to_pylist()
        return str(row["slice"]) if row["slice"] else None
    return None


def _states(lake: Lake, since: datetime) -> dict[str, int]:
    """The number of slices of the last minutes in each state."""
    sql = f"""SELECT state, count(*) AS slices FROM slices_{FINAL}
        WHERE slice_end > TIMESTAMPTZ '{since.isoformat()}' GROUP BY state"""
    with suppress(Refusal):
        return {row["state"]: row["slices"] for row in lake.query(sql).to_pylist()}
    return {}


def _account(api: AirflowApi, lake: Lake, tell: Tell) -> None:
    """Account for the slice now. Unpausing the DAG starts a run; if it was already unpaused, trigger one.

    Otherwise the next run would come up to a quarter of an hour later.
    """
    dag_id, deadline = PIPELINES[FINAL].account_job, time.monotonic() + _FINAL_SECONDS
    already_on = not api.dags(dag_id)[dag_id]["is_paused"]
    api.unpause(dag_id)
    if already_on:
        api.trigger(dag_id)
    newest = _newest_final(lake, datetime.now(UTC))
    done = f"SELECT 1 FROM balance_{FINAL} WHERE kind = 'slice' AND slice >= '{newest}'"
    while not lake.query(done).num_rows:
        runs = api.runs(dag_id)
        tell(f"{dag_id} is {runs[0]['state']}" if runs else f"{dag_id} is about to start")
        if any(run["state"] == "failed" for run in runs[:1]) or time.monotonic() > deadline:
            last_lines = _last_words(api, dag_id, runs[0]["dag_run_id"]) if runs else "it has no run"
            raise Refusal(f"{dag_id} failed, or took over {_FINAL_SECONDS} s; the last lines of its log:\n{last_lines}")
        time.sleep(1)


def _start_the_rest(api: AirflowApi) -> None:
    """Start the other batch DAGs. Earlier, they would only have delayed the first final windows."""
    for name in SHOWN:
        for dag_id in (PIPELINES[name].recompute_job, PIPELINES[name].account_job, PIPELINES[name].check_job):
            api.unpause(dag_id)


def _slices(lake: Lake) -> Table:
    """The newest slices, final ones and those that are still live."""
    answer = lake.query(
        f"""SELECT strftime(time_bucket(INTERVAL '{PIPELINES[FINAL].slice_seconds} seconds', window_start), '%H:%M:%S')
          AS slice, finality, version, count(*) AS windows, sum(events) AS events
        FROM {FINAL} GROUP BY ALL ORDER BY slice DESC LIMIT 8"""
    )
    table = Table(*answer.column_names, title=f"{FINAL}, slice by slice", title_justify="left")
    for row in as_text(answer):
        table.add_row(*row, style="green" if row[1] == "final" else None)
    return table


def _drift_line(lake: Lake) -> str:
    """How far live was off in the final slices, and why."""
    (total,) = lake.query(
        f"""SELECT count(*) AS slices, sum(windows) AS windows, sum(differing) AS differing,
          sum(unexplained) AS unexplained FROM balance_{FINAL} WHERE kind = 'slice'"""
    ).to_pylist()
    causes = lake.query(
        f"SELECT cause, sum(events) AS events FROM balance_{FINAL} WHERE kind = 'cause' GROUP BY cause ORDER BY 2 DESC"
    ).to_pylist()
    why = ", ".join(f"{row['events']:,} {row['cause']}" for row in causes) or "no event came late"
    return (
        f"Drift of {total['slices']} final slices: live differed in {total['differing'] or 0:,} of "
        f"{total['windows'] or 0:,} windows (events: {why}); unexplained: {total['unexplained'] or 0}"
    )


def _refuse_failed_streams(api: AirflowApi, began: datetime) -> None:
    for job in STREAMS:
        for ended in api.runs(dag_id_of(job)):
            if ended["state"] == "failed" and datetime.fromisoformat(ended["end_date"]) > began:
                raise Refusal(f"the stream {job} failed:\n{_last_words(api, dag_id_of(job), ended['dag_run_id'])}")


def _stream_says(api: AirflowApi, job: str) -> str:
    runs = api.runs(dag_id_of(job))
    return f"{job}:\n{_last_words(api, dag_id_of(job), runs[0]['dag_run_id'])}" if runs else f"{job} has no run"


def _last_words(api: AirflowApi, dag_id: str, run_id: str) -> str:
    """The end of the log of each task that ran."""
    ran = [task for task in api.task_instances(dag_id, run_id) if task["try_number"]]
    logs = (api.task_log(dag_id, run_id, task["task_id"], task["try_number"]) for task in ran)
    return "\n".join(line for log in logs for line in log.splitlines()[-10:])


def _newest(lake: Lake, name: str) -> Table:
    """The newest windows, in a table that fits into a terminal."""
    pipeline = PIPELINES[name]
    columns = ", ".join((*pipeline.value_columns, "finality"))
    answer = lake.query(
        f"SELECT strftime(window_start, '%H:%M:%S') AS window_start, {columns} FROM {name} "
        f"ORDER BY {name}.window_start DESC, {', '.join(pipeline.keys)} LIMIT 5"
    )
    table = Table(*answer.column_names, title=name, title_justify="left")
    for row in as_text(answer):
        table.add_row(*row)
    return table
