"""Pages about the slices of a pipeline, their history, and the results of Great Expectations in a run."""

from collections.abc import Mapping
from html import escape
from typing import Annotated

from airflow.api_fastapi.core_api.security import requires_access_dag
from fastapi import APIRouter, Depends, HTTPException
from fastapi.responses import HTMLResponse

from jobs.control.incident import blocked_key
from jobs.finality.auditing import audit_page
from jobs.finality.checking import check_page
from jobs.finality.run.folder import RunFolder
from jobs.finality.tide_line import begin_and_tide_line
from jobs.lake.ledger import Ledger
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.slices import LedgerLine, State
from jobs.pipelines import PIPELINES
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.rules import RefusedDefinitionError
from jobs.pipelines.slices import slice_named
from jobs.settings import Settings
from jobs.times import iso
from tideline_airflow.console.parts import STYLE, Link, table
from tideline_airflow.links import DataDocsLink, address

_SHOWN = 200

router = APIRouter(dependencies=[Depends(requires_access_dag(method="GET"))])


def _pipeline(dag_id: str) -> Pipeline:
    found = {pipeline.recompute_job: pipeline for pipeline in PIPELINES.values()}.get(dag_id)
    if found is None:
        raise HTTPException(404, f"DAG {dag_id} makes no slices final: only the DAGs recompute_PIPELINE have this page")
    return found


_Pipeline = Annotated[Pipeline, Depends(_pipeline)]


@router.get("/slices/{dag_id}", response_class=HTMLResponse)
def slices(pipeline: _Pipeline) -> str:
    """The newest slices and the tide line."""
    ledger = _lake(pipeline).ledger()
    if ledger is None:
        nothing = f"<p>No plan was made yet: unpause the DAG {pipeline.recompute_job}.</p>"
        return _page(f"Slices of {pipeline.name}", nothing)
    newest, is_all = _newest(ledger)
    rows = [_row(pipeline, newest[name]) for name in sorted(newest, reverse=True)[:_SHOWN]]
    more = f"<p>Older slices: <code>tideline query 'select * from slices_{pipeline.name}'</code></p>"
    heads = ("slice", "state", "version", "rows", "events", "late", "since", "reason")
    return _page(
        f"Slices of {pipeline.name}",
        f"<p>{escape(_said(pipeline, newest))}</p>{table(heads, rows)}{'' if is_all else more}",
    )


def _newest(ledger: Ledger) -> tuple[dict[str, LedgerLine], bool]:
    """The slices of the newest days, enough to fill a page, and whether these are all slices."""
    found: dict[str, LedgerLine] = {}
    days = ledger.days()
    while days and len(found) <= _SHOWN:
        found |= ledger.newest_of([days.pop()])
    return found, len(found) <= _SHOWN


@router.get("/slices/{dag_id}/{name}", response_class=HTMLResponse)
def one_slice(pipeline: _Pipeline, name: str) -> str:
    """The header and the history of a slice, and why it is blocked."""
    try:
        known = slice_named(pipeline, name).name
    except RefusedDefinitionError as refusal:
        raise HTTPException(404, str(refusal)) from refusal
    lake = _lake(pipeline)
    ledger, final = lake.ledger(), lake.final()
    history = ledger.history(known) if ledger else []
    header = final.header(known) if final else None
    if not history and header is None:
        raise HTTPException(404, f"slice {known} of {pipeline.name} is neither in the ledger nor final")
    heads = ("time", "state", "version", "rows", "events", "late", "run", "reason", "checks")
    rows = [
        (*_of(entry), entry.run, entry.reason, Link("Data Docs", _docs(pipeline, entry))) for entry in reversed(history)
    ]
    facts = [(key, value) for key, value in vars(header).items()] if header else []
    shown = (
        f"<h2>Served</h2>{table(('what', 'value'), facts)}"
        if facts
        else "<p>It is not final: live rows are served.</p>"
    )
    verdict = _verdict(pipeline, known, history)
    return _page(f"Slice {known} of {pipeline.name}", f"{shown}{verdict}<h2>History</h2>{table(heads, rows)}")


@router.get("/quality/{dag_id}/{run}.html", response_class=HTMLResponse)
def data_docs(dag_id: str, run: str) -> str:
    """The results of Great Expectations in a run."""
    audits = {pipeline.recompute_job: (pipeline, audit_page) for pipeline in PIPELINES.values()}
    checks = {pipeline.check_job: (pipeline, check_page) for pipeline in PIPELINES.values()}
    pipeline, place = {**audits, **checks}.get(dag_id, (None, None))
    if pipeline is None or place is None:
        raise HTTPException(404, f"DAG {dag_id} has no page of checks: only recompute_PIPELINE and check_PIPELINE have")
    path = place(_lake(pipeline), run)
    if not path.is_file():
        raise HTTPException(404, f"run {run} of {dag_id} has no page of checks: nothing was checked, or it was deleted")
    return path.read_text(encoding="utf-8")


def _lake(pipeline: Pipeline) -> PipelineLake:
    return PipelineLake(Settings.from_env().lake_root, pipeline)


def _row(pipeline: Pipeline, entry: LedgerLine) -> tuple[object, ...]:
    link = Link(entry.slice, address(f"slices/{pipeline.recompute_job}/{entry.slice}"))
    state = (
        "outdated" if entry.state is State.FINAL and entry.fingerprint != pipeline.fingerprint else entry.state.value
    )
    return (link, state, entry.version, entry.rows, entry.events, entry.late, iso(entry.at_ms), entry.reason)


def _of(entry: LedgerLine) -> tuple[object, ...]:
    return (iso(entry.at_ms), entry.state.value, entry.version, entry.rows, entry.events, entry.late)


def _said(pipeline: Pipeline, newest: Mapping[str, LedgerLine]) -> str:
    lake = _lake(pipeline)
    _, tide_line_ms = begin_and_tide_line(pipeline, lake.final(), lake.events())
    blocked = {name for name, entry in newest.items() if entry.state is State.BLOCKED}
    prefix = blocked_key(pipeline.name, "")
    blocked |= {incident.key.removeprefix(prefix) for incident in lake.incidents().still_open(prefix)}
    parts = [f"Final up to {iso(tide_line_ms)}." if tide_line_ms is not None else "The first slice is not final yet."]
    parts += [f"Blocked: {', '.join(sorted(blocked))}."] if blocked else []
    return " ".join(parts)


def _docs(pipeline: Pipeline, entry: LedgerLine) -> str | None:
    judged = audit_page(_lake(pipeline), entry.run).is_file()
    return DataDocsLink.address(pipeline.recompute_job, entry.run) if judged else None


def _verdict(pipeline: Pipeline, name: str, history: list[LedgerLine]) -> str:
    """The failed checks of a slice that is blocked now."""
    if not history or history[-1].state is not State.BLOCKED:
        return ""
    verdict = (RunFolder.of(_lake(pipeline), history[-1].run).verdicts() or {}).get(name, {})
    rows = [(f["expectation"], f["severity"], f["observed"]) for f in verdict.get("failures", ())]
    return f"<h2>Why it is blocked</h2>{table(('expectation', 'severity', 'observed'), rows)}"


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>"
    )
