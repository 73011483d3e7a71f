"""The audit of a run: its staged rows against the pipeline's checks; what fails is blocked, and an incident."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from jobs.connectors import planning
from jobs.connectors.checksums import checksum
from jobs.connectors.final import FinalTable, columns_of
from jobs.connectors.incidents import Incidents, blocked
from jobs.connectors.parquet import arrow_place
from jobs.connectors.runs import KEPT_SECONDS, Plan, RunFolder, Work, name_of
from jobs.connectors.states import State
from jobs.failpoints import FailPoint, reach
from jobs.folders import Folder
from jobs.pipelines.spec import Pipeline
from jobs.quality import page
from jobs.quality.audit import SMALL_ROWS, audit
from jobs.quality.verdict import Verdict
from jobs.refusal import Refusal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# How many final slices say what is usual.
_HISTORY = 20


def staged_rows(lake_root: Folder, pipeline: Pipeline, run: str) -> int:
    """How many rows a run has staged: what decides between an audit in memory and one by Spark."""
    folder = RunFolder.of(lake_root, pipeline, run)
    return sum(_dataset(pipeline, folder, work.slice).count_rows() for work in folder.plan().work)


def is_small(rows: int) -> bool:
    """Whether so many rows are judged in memory."""
    return rows <= SMALL_ROWS


def examine(
    lake_root: Folder, pipeline: Pipeline, run: str, *, spark: "SparkSession | None" = None, link: str | None = None
) -> dict[str, Verdict]:
    """Judge the staged slices of a run; verdicts go to its folder, and bad ones to the ledger and the incidents."""
    folder = RunFolder.of(lake_root, pipeline, run)
    plan, read = folder.plan(), folder.events_read()
    if read is None:
        raise Refusal(f"run {run!r} of {pipeline.name!r} has staged nothing: clear its recompute, or plan it anew")
    docs = page_of(lake_root, pipeline, run)
    said = str(docs).removeprefix(f"{lake_root}/")
    now_ms = round(time.time() * 1000)
    planning.note(lake_root, pipeline, (plan.entry(w, State.AUDITING, at_ms=now_ms, docs=said) for w in plan.work))
    rows = {work.slice: _dataset(pipeline, folder, work.slice) for work in plan.work}
    page.discard_old(docs.parent, KEPT_SECONDS)
    verdicts = _judge(lake_root, pipeline, plan, rows, read, docs, spark)
    folder.decide(
        {
            work.slice: {
                "passed": verdicts[work.slice].passed,
                "failures": [
                    {**asdict(failure), "sentence": failure.sentence} for failure in verdicts[work.slice].worst_first
                ],
                "rows": rows[work.slice].count_rows(),
                "checksum": checksum(pipeline, rows[work.slice]),
            }
            for work in plan.work
        }
    )
    _block(lake_root, pipeline, plan, verdicts, said, link)
    reach(FailPoint.AUDITED, 0)
    return verdicts


def page_of(lake_root: Folder, pipeline: Pipeline, run: str) -> Folder:
    """The page about the audit of a run."""
    return lake_root / "quality" / pipeline.name / f"{name_of(run)}.html"


def _judge(
    lake_root: Folder,
    pipeline: Pipeline,
    plan: Plan,
    rows: Mapping[str, ds.Dataset],
    read: Mapping[str, int],
    docs: Folder,
    spark: "SparkSession | None",
) -> dict[str, Verdict]:
    if not plan.work:
        return {}
    final = FinalTable.read(lake_root, pipeline)
    usual = _usual_rows(final) if final else None
    facts = pd.DataFrame([_facts(pipeline, work, rows[work.slice], read, usual) for work in plan.work])
    folder = RunFolder.of(lake_root, pipeline, plan.run)
    windows: Any = spark.read.parquet(str(folder.windows)) if spark else _in_memory(rows)
    return audit(pipeline, windows, facts, run=plan.run, docs=docs)


def _dataset(pipeline: Pipeline, folder: RunFolder, slice_: str) -> ds.Dataset:
    places = [arrow_place(file) for file in folder.files(slice_)]
    if not places:
        return _nothing(pipeline)
    return ds.dataset([name for name, _ in places], columns_of(pipeline), format="parquet", filesystem=places[0][1])


def _nothing(pipeline: Pipeline) -> ds.Dataset:
    return ds.dataset(columns_of(pipeline).empty_table())


def _in_memory(rows: Mapping[str, ds.Dataset]) -> pa.Table:
    tables = []
    for name, found in rows.items():
        table = found.to_table()
        tables.append(table.append_column("slice", pa.array([name] * table.num_rows, pa.string())))
    return pa.concat_tables(tables)


def _facts(
    pipeline: Pipeline, work: Work, rows: ds.Dataset, read: Mapping[str, int], usual: float | None
) -> dict[str, Any]:
    return {
        "slice": work.slice,
        "rows": rows.count_rows(),
        "events": work.events,
        "read": read.get(work.slice, 0),
        "counted": _sum(rows, pipeline.counts) if pipeline.counts else None,
        "window_events": work.window_events if pipeline.counts else None,
        "usual_rows": usual,
    }


def _sum(rows: ds.Dataset, measure: str) -> int:
    with duckdb.connect() as database:
        database.register("staged", rows)
        found = database.execute(f'SELECT coalesce(sum("{measure}"), 0) FROM staged').fetchone()
    return int(found[0]) if found else 0


def _usual_rows(final: FinalTable) -> float | None:
    """The median of the newest final slices that have rows at all."""
    newest: list[int] = []
    for day in reversed(final.days()):
        headers = final.headers({day})
        newest += [headers[name].rows for name in sorted(headers, reverse=True) if headers[name].rows]
        if len(newest) >= _HISTORY:
            break
    return median(newest[:_HISTORY]) if newest else None


def _block(
    lake_root: Folder, pipeline: Pipeline, plan: Plan, verdicts: Mapping[str, Verdict], docs: str, link: str | None
) -> None:
    bad = [work for work in plan.work if not verdicts[work.slice].passed]
    if not bad:
        return
    reasons, now_ms = {work.slice: verdicts[work.slice].sentence for work in bad}, round(time.time() * 1000)
    planning.note(
        lake_root,
        pipeline,
        (plan.entry(w, State.BLOCKED, at_ms=now_ms, docs=docs, reason=reasons[w.slice]) for w in bad),
    )
    incidents = Incidents.of(lake_root)
    for work in bad:
        text = (
            f"slice {work.slice} of {pipeline.name} is blocked: {reasons[work.slice]}; nothing of it is published. "
            f"Mend the data or the definition, then restate it, or publish it anyway with the DAG publish_blocked"
        )
        incidents.open(blocked(pipeline.name, work.slice), text, link=link)
