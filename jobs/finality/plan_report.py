"""Reports a plan to people, as rows, a table and sentences. Airflow passes the report on as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jobs.finality.due import MAX_SLICES
from jobs.finality.planning import Planned
from jobs.pipelines.slices import Slice, adjacent_groups
from jobs.times import iso

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("slice", "why", "version", "events", "late")
_NAMED = 5


def shown(planned: Planned) -> dict[str, Any]:
    """The whole report as JSON."""
    survey, plan = planned.survey, planned.plan
    rows = [
        {"slice": w.slice, "why": w.reason, "version": w.version + 1, "events": w.events, "late": w.late}
        for w in plan.work
    ]
    return {
        "slices": rows,
        "tide_line": iso(survey.tide_line_ms) if survey.tide_line_ms is not None else None,
        "refused": {slice_.name: why for slice_, why in sorted(survey.refused.items())},
        "said": list(_sentences(planned)),
    }


def _sentences(planned: Planned) -> Iterable[str]:
    survey, plan = planned.survey, planned.plan
    line = (
        f"every slice up to {iso(survey.tide_line_ms)} is final"
        if survey.tide_line_ms is not None
        else "no slice is final yet"
    )
    events = sum(work.events for work in plan.work)
    yield f"{len(plan.work)} slices with {events:,} events to recompute; {line}."
    if len(survey.due) > len(plan.work):
        yield f"{len(survey.due) - len(plan.work)} more are due: a run takes {MAX_SLICES:,} at most."
    for slice_, why in sorted(survey.refused.items())[:_NAMED]:
        yield f"{slice_.name} is refused: {why}."
    if len(survey.refused) > _NAMED:
        yield f"{len(survey.refused) - _NAMED} more are refused."
    refused = set(survey.refused)
    if waiting := [slice_ for slice_ in survey.waiting if slice_ not in refused]:
        yield f"{ranges(waiting)} wait for ingest."
    if survey.blocked:
        yield f"{ranges(survey.blocked)} are blocked by the audit: see the DAG publish_blocked."
    if survey.outdated:
        older = f"{ranges(survey.outdated)} were made final by an older definition, and there may be older ones"
        yield f"{older}: a run with outdated=true computes all of them again."
    if plan.unannounced:
        yield f"{len(plan.unannounced)} published slices are not in topic or ledger yet: a run writes them there."


def ranges(slices: Iterable[Slice]) -> str:
    """Slices in a few words. Adjacent slices are written as one range."""
    groups = adjacent_groups(slices)
    words = [group[0].name if len(group) == 1 else f"{group[0].name} to {group[-1].name}" for group in groups[:_NAMED]]
    more = f" and {len(groups) - _NAMED} more ranges" if len(groups) > _NAMED else ""
    return f"{sum(map(len, groups))} slices ({', '.join(words)}{more})"


def table(rows: Sequence[Mapping[str, Any]]) -> "Table":
    """The slices of a plan, one per line."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(*COLUMNS)
    for row in rows:
        drawn.add_row(*(Text(f"{row[name]:,}" if name in ("events", "late") else str(row[name])) for name in COLUMNS))
    return drawn


def markdown(report: Mapping[str, Any], length: int) -> str:
    """The text of a run's note: the sentences, then as many slices as there is room for."""
    lines = [" ".join(report["said"]), "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(str(row[name]) for name in COLUMNS)} |" for row in report["slices"]]
    if not report["slices"]:
        return lines[0][:length]
    text = "\n".join(lines)
    if len(text) <= length:
        return text
    more = "\n\nand more: see the task's log"
    return text[: length - len(more)].rpartition("\n")[0] + more
