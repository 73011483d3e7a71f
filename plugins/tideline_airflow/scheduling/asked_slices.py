"""Decides which slices a run of `recompute_…` takes: scheduled, backfill, by hand or cleared. Pure functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow.sdk.types import DagRunProtocol as Run

from jobs.finality.due import MAX_SLICES, Request
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import Slice, slices_between
from jobs.refusal import Refusal
from jobs.times import parse_time
from tideline_airflow.scheduling.partitions import slice_of


@dataclass(frozen=True, kw_only=True)
class Outdated:
    """All slices that an older definition made final, and why they are restated. The plan task finds them in the lake.

    `Request` names its slices instead.
    """

    reason: str


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The slices that a run takes: those of a request, all that are outdated, or (None) those that are due.

    A dry run writes nothing.
    """

    request: Request | Outdated | None = None
    dry_run: bool = False


def asked(pipeline: Pipeline, run: Run, params: Mapping[str, Any], earlier: Callable[[], Sequence[Slice]]) -> Asked:
    """Decide which slices a run takes. ``earlier`` returns those that it took before it was cleared."""
    if run.run_type not in ("scheduled", "backfill"):
        # Started by a person or by another DAG. Their params name the slices.
        return _by_hand(pipeline, run, params, earlier)
    if run.clear_number:
        return Asked(request=_again(pipeline, run, earlier))
    if run.run_type == "backfill":
        return Asked(request=_own_slice(pipeline, run, f"backfill {run.run_id}"))
    return Asked()


def _by_hand(pipeline: Pipeline, run: Run, params: Mapping[str, Any], earlier: Callable[[], Sequence[Slice]]) -> Asked:
    dry_run, reason = bool(params["dry_run"]), str(params.get("reason") or "").strip()
    slices = _between(pipeline, params.get("from"), params.get("to"))
    wants = bool(slices or params.get("outdated") or run.partition_key)
    if wants and not dry_run and not reason:
        raise Refusal("a run that restates slices needs a reason: set reason, and the ledger records it")
    if params.get("outdated"):
        if slices:
            raise Refusal("the form has both an interval and outdated=true: set from and to, or outdated, but not both")
        return Asked(request=Outdated(reason=reason or "dry run"), dry_run=dry_run)
    if slices:
        return Asked(request=Request(slices=slices, reason=reason or "dry run"), dry_run=dry_run)
    if run.partition_key:
        return Asked(request=_own_slice(pipeline, run, reason or "dry run"), dry_run=dry_run)
    return Asked(request=_again(pipeline, run, earlier) if run.clear_number and not dry_run else None, dry_run=dry_run)


def _between(pipeline: Pipeline, from_: str | None, to: str | None) -> tuple[Slice, ...]:
    if not from_ and not to:
        return ()
    if not from_ or not to:
        raise Refusal(f"an interval needs two ends, but from={from_} and to={to}: set both, or none of them")
    from_ms, to_ms = parse_time(from_), parse_time(to)
    if from_ms >= to_ms:
        raise Refusal(f"from={from_} is not before to={to}: set a later end")
    if (count := (to_ms - from_ms) // (pipeline.slice_seconds * 1000)) > MAX_SLICES:
        raise Refusal(f"from={from_} to={to}: {count:,} slices, and a run takes at most {MAX_SLICES:,}: set a part")
    return tuple(slices_between(pipeline, from_ms, to_ms))


def _again(pipeline: Pipeline, run: Run, earlier: Callable[[], Sequence[Slice]]) -> Request | None:
    slices = tuple(earlier())
    return Request(slices=slices, reason="cleared") if slices else _own_slice(pipeline, run, "cleared")


def _own_slice(pipeline: Pipeline, run: Run, reason: str) -> Request | None:
    return Request(slices=(slice_of(pipeline, run.partition_key),), reason=reason) if run.partition_key else None
