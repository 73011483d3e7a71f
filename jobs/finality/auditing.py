"""The audit judges a run's staged rows by the pipeline's checks. A slice that fails is blocked, with an incident."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from statistics import median
from typing import TYPE_CHECKING, Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from jobs.control.incident import blocked_key
from jobs.failpoints import FailPoint, may_fail_at
from jobs.finality import planning
from jobs.finality.run.folder import KEPT_SECONDS, Plan, RunFolder, Work, name_of
from jobs.finality.run.tries import StagedSlice
from jobs.lake.columns import checksum, columns_of
from jobs.lake.final import INPUTS, FinalTable
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.slices import State
from jobs.pipelines.layout import PAGES
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.window import Severity
from jobs.quality import page
from jobs.quality.audit import audit
from jobs.quality.verdict import Failure, Verdict
from jobs.refusal import Refusal
from jobs.storage.folders import Folder
from jobs.storage.parquet import arrow_place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The usual number of rows is the median of this many final slices. They are searched for in the newest days that have
# final slices, and not in all: each slice of an idle pipeline is empty.
_HISTORY = 20
_HISTORY_DAYS = 14


def staged_rows(lake: PipelineLake, run: str) -> int:
    """The number of rows that a run has staged. It decides between an audit in memory and one by Spark."""
    return sum(slice_.rows for slice_ in (RunFolder.of(lake, run).staged() or {}).values())


def examine(
    lake: PipelineLake, run: str, *, now_ms: int, spark: "SparkSession | None" = None, link: str | None = None
) -> dict[str, Verdict]:
    """Judge the staged slices of a run. Verdicts go to its folder, bad ones also to the ledger and the incidents.

    ``now_ms``: by the broker's clock. It is the time of the lines in the ledger.
    """
    pipeline, folder = lake.pipeline, RunFolder.of(lake, run)
    whole, staged, failed = folder.plan(), folder.staged(), folder.failed()
    if staged is None:
        raise Refusal(
            f"run {run!r} of {pipeline.name!r} has no staged rows: clear its task recompute, or its task plan"
        )
    plan = whole.only(staged)
    docs = audit_page(lake, run)
    page_name = str(docs).removeprefix(f"{lake.root}/")
    planning.write_states(lake, (plan.line(w, State.AUDITING, at_ms=now_ms, docs=page_name) for w in plan.work))
    files = folder.files_by_slice()
    rows = {name: _dataset(pipeline, files(name)) for name in plan.names}
    _require_all(folder, staged, rows)
    page.discard_old(docs.parent, KEPT_SECONDS)
    verdicts = _judge(lake, plan, rows, staged, docs, spark)
    documents = {
        name: _document(verdict, rows=staged[name].rows, checksum=checksum(pipeline, rows[name]))
        for name, verdict in verdicts.items()
    }
    verdicts |= {name: _not_computed(why) for name, why in failed.items()}
    folder.keep_verdicts(documents | {name: _document(verdicts[name], rows=0, checksum="") for name in failed})
    _block(lake, whole.only(verdicts), verdicts, page_name, link, now_ms)
    may_fail_at(FailPoint.AUDITED, 0)
    return verdicts


def _require_all(folder: RunFolder, staged: Mapping[str, StagedSlice], rows: Mapping[str, ds.Dataset]) -> None:
    """Refuse to judge fewer rows than were staged: a missing or shorter file is no fault of the data."""
    there = {name: found.count_rows() for name, found in rows.items()}
    if torn := [name for name, slice_ in staged.items() if there[name] != slice_.rows]:
        first = torn[0]
        raise Refusal(
            f"slice {first} has {there[first]:,} of its {staged[first].rows:,} staged rows in {folder.path} "
            f"(slices with such a difference: {len(torn)}): nothing is published, and the next run computes them again"
        )


def _document(verdict: Verdict, *, rows: int, checksum: str) -> dict[str, Any]:
    """The stored form of a verdict. Without a checksum there are no rows that a person could approve."""
    failures = [{**asdict(failure), "sentence": failure.sentence} for failure in verdict.worst_first]
    return {"passed": verdict.passed, "failures": failures, "rows": rows, "checksum": checksum}


def _not_computed(why: str) -> Verdict:
    failure = Failure(
        expectation="the slice can be computed",
        type="computed",
        column=None,
        severity=Severity.CRITICAL,
        observed=why,
    )
    return Verdict(failures=(failure,))


def audit_page(lake: PipelineLake, run: str) -> Folder:
    """The page about the audit of a run."""
    return lake.root / PAGES / lake.pipeline.name / f"{name_of(run)}.html"


def _judge(
    lake: PipelineLake,
    plan: Plan,
    rows: Mapping[str, ds.Dataset],
    staged: Mapping[str, StagedSlice],
    docs: Folder,
    spark: "SparkSession | None",
) -> dict[str, Verdict]:
    if not plan.work:
        return {}
    pipeline, final = lake.pipeline, lake.final()
    usual = _usual_rows(final) if final else None
    facts = pd.DataFrame([_facts(pipeline, work, rows[work.slice], staged[work.slice], usual) for work in plan.work])
    windows: Any = _by_spark(spark, RunFolder.of(lake, plan.run)) if spark else _in_memory(rows)
    return audit(pipeline, windows, facts, run=plan.run, docs=docs)


def _dataset(pipeline: Pipeline, files: Sequence[Folder]) -> ds.Dataset:
    places = [arrow_place(file) for file in files]
    columns = columns_of(pipeline).append(pa.field(INPUTS, pa.int64()))
    if not places:
        return ds.dataset(columns.empty_table())
    return ds.dataset([name for name, _ in places], columns, format="parquet", filesystem=places[0][1])


def _in_memory(rows: Mapping[str, ds.Dataset]) -> pa.Table:
    tables = []
    for name, found in rows.items():
        table = found.to_table()
        tables.append(table.append_column("slice", pa.array([name] * table.num_rows, pa.string())))
    return pa.concat_tables(tables)


def _by_spark(spark: "SparkSession", folder: RunFolder) -> Any:
    """Read the folder of each try by itself. Read together, they would seem to be partitioned in different ways."""
    frames = [spark.read.parquet(str(stage)) for stage in folder.stages()]
    return reduce(lambda one, other: one.unionByName(other), frames)


def _facts(
    pipeline: Pipeline, work: Work, rows: ds.Dataset, staged: StagedSlice, usual: float | None
) -> dict[str, Any]:
    """The numbers of a slice. `quality.suite.of_slices` compares them in pairs, each counted in two ways.

    | name | who counts it | what is counted | must equal |
    |---|---|---|---|
    | `rows` | recompute | rows in the footers of the staged files | `staged`: the rows that `quality` finds |
    | `events` | plan | landed events with a time in the slice | `read` |
    | `read` | recompute | the same events, as Spark has read them | `events` |
    | `window_events` | plan | landed events, once for each of their windows | `counted` |
    | `counted` | audit | sum of the measure `Pipeline.counts` in the staged rows | `window_events` |
    | `expected` | recompute | rows of the transform, once for each of their windows | `inputs` |
    | `inputs` | audit | sum of the column `INPUTS` in the staged rows | `expected` |
    | `usual_rows` | audit | the median number of rows of the newest final slices | about `rows` |

    Without `Pipeline.counts` there are no `window_events` and `counted`.
    """
    return {
        "slice": work.slice,
        "rows": staged.rows,
        "events": work.events,
        "read": staged.read,
        "counted": _sum(rows, pipeline.counts) if pipeline.counts else None,
        "window_events": work.window_events if pipeline.counts else None,
        "inputs": _sum(rows, INPUTS),
        "expected": staged.expected,
        "usual_rows": usual,
    }


def _sum(rows: ds.Dataset, measure: str) -> int:
    with duckdb.connect() as database:
        database.register("staged", rows)
        found = database.execute(f'SELECT coalesce(sum("{measure}"), 0) FROM staged').fetchone()
    return int(found[0]) if found else 0


def _usual_rows(final: FinalTable) -> float | None:
    """The median number of rows of the newest final slices. Slices without rows do not count."""
    newest: list[int] = []
    for day in reversed(final.days()[-_HISTORY_DAYS:]):
        headers = final.headers({day})
        newest += [headers[name].rows for name in sorted(headers, reverse=True) if headers[name].rows]
        if len(newest) >= _HISTORY:
            break
    return median(newest[:_HISTORY]) if newest else None


def _block(
    lake: PipelineLake, plan: Plan, verdicts: Mapping[str, Verdict], docs: str, link: str | None, now_ms: int
) -> None:
    """Block the slices that failed, and open an incident for each. ``plan`` holds only slices with a verdict."""
    bad = [work for work in plan.work if not verdicts[work.slice].passed]
    if not bad:
        return
    reasons = {work.slice: verdicts[work.slice].sentence for work in bad}
    blocked_lines = (plan.line(w, State.BLOCKED, at_ms=now_ms, docs=docs, reason=reasons[w.slice]) for w in bad)
    planning.write_states(lake, blocked_lines)
    name = lake.pipeline.name
    texts = {
        blocked_key(name, slice_): f"slice {slice_} of {name} is blocked: {reason}. Its new rows are not published. "
        "Correct the data or the definition, then restate the slice, or publish it anyway with the DAG publish_blocked"
        for slice_, reason in reasons.items()
    }
    lake.incidents().open_all(texts, link=link)
