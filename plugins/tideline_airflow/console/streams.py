"""Pages per streaming job: one with its state, progress and epochs, its log, and a redirect to its Spark UI."""

from html import escape
from pathlib import Path
from typing import Annotated

from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.core_api.security import requires_access_dag
from fastapi import APIRouter, Depends, HTTPException
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse

from jobs.control.epochs import Epoch, Health, failures
from jobs.control.folder import Control, death_of, tail
from jobs.control.incidents import Incidents
from jobs.pipelines import STREAMS
from jobs.pipelines.layout import dag_id_of
from jobs.settings import Settings
from jobs.times import utc
from tideline_airflow.console.parts import STYLE, table
from tideline_airflow.links import driver_logs

_TAIL_BYTES = 500_000

router = APIRouter(prefix="/streams/{dag_id}", dependencies=[Depends(requires_access_dag(method="GET"))])


def _control(dag_id: str) -> Control:
    job = {dag_id_of(job): job for job in STREAMS}.get(dag_id)
    if job is None:
        raise HTTPException(404, f"DAG {dag_id} runs no stream")
    return Control.of(Settings.from_env().lake_root, job)


_Control = Annotated[Control, Depends(_control)]


@router.get("", response_class=HTMLResponse)
def stream(control: _Control) -> str:
    """The state of a stream. The page reloads every five seconds."""
    history = control.history()
    incidents = Incidents.of(Settings.from_env().lake_root).still_open(f"stream.{control.job}.")
    own = [incident.text for incident in incidents]
    body = _body(control, history, own) if history else f"<h1>{control.job}</h1><p>It was never started.</p>"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{control.job}</title>'
        f'<meta http-equiv="refresh" content="5"><style>{STYLE}</style></head><body>{body}</body></html>'
    )


@router.get(
    "/log",
    response_class=PlainTextResponse,
    dependencies=[Depends(requires_access_dag(method="GET", access_entity=DagAccessEntity.TASK_LOGS))],
)
def driver_log(control: _Control) -> str:
    """The end of the newest driver's log."""
    epoch = control.newest_epoch()
    if epoch is None or epoch.log is None:
        raise HTTPException(404, f"no log of {control.job} is known: was its driver started by hand?")
    path = Path(epoch.log).resolve()
    if not path.is_relative_to(driver_logs(control.job).resolve()) or not path.is_file():
        raise HTTPException(404, f"{epoch.log} cannot be read here: it lies on the machine where the task ran")
    return tail(path, _TAIL_BYTES)


@router.get("/spark")
def spark_ui(control: _Control) -> RedirectResponse:
    """Redirect to the Spark UI of the driver that runs."""
    epoch = control.newest_epoch()
    if epoch is None or not control.health(epoch).alive or epoch.beat is None or epoch.beat.ui is None:
        raise HTTPException(404, f"no driver of {control.job} runs, so there is no Spark UI")
    return RedirectResponse(epoch.beat.ui)


def _body(control: Control, history: list[Epoch], incidents: list[str]) -> str:
    newest = history[-1]
    health = control.health(newest)
    page = dag_id_of(control.job)
    failed = failures(history)
    return "".join(
        [
            f'<h1>{control.job} <span class="state {health}">{health}</span></h1>',
            f"<p>Epoch {newest.number}, last heartbeat {_utc(newest.last_sign)}."
            f"{f' Failures in a row: {failed}.' if failed else ''}"
            f' <a href="{page}/log">Driver’s log</a> · <a href="{page}/spark">Spark UI</a></p>',
            *(f'<p class="incident">{escape(text)}</p>' for text in incidents),
            "<h2>Progress</h2>",
            table(
                ("topic", "batch", "rows", "rows/s", "seconds", "lag", "watermark", "last step"),
                (
                    (q.topic, q.batch, q.rows, q.rows_per_second, q.batch_seconds, q.lag, q.watermark, _utc(q.stepped))
                    for q in newest.queries
                ),
            ),
            "<h2>Epochs</h2>",
            table(
                ("epoch", "began", "ended", "state", "cause"),
                ((e.number, _utc(e.taken), *_ending(control, e)) for e in reversed(history)),
            ),
        ]
    )


def _ending(control: Control, epoch: Epoch) -> tuple[str, str, str]:
    if epoch.receipt:
        return _utc(epoch.receipt.time), control.health(epoch), epoch.receipt.cause
    health = control.health(epoch)
    if health is Health.DEAD:
        return "", health, death_of(epoch)
    return "", health, f"asked to stop by {epoch.stop.by}" if epoch.stop else ""


def _utc(moment: float) -> str:
    return f"{utc(moment)} UTC"
