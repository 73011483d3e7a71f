"""The incident about differences that no event explains."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jobs.control.incident import unexplained
from jobs.lake.drift import Accounts
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines.pipeline import Pipeline
from jobs.times import iso

log = logging.getLogger(__name__)


def keep_incident(lake: PipelineLake, accounts: Accounts, link: str | None) -> None:
    """Open or close the incident, judging by all stored accounts and not only by those of this run.

    An earlier run may have been killed before it opened the incident, or may have seen other slices.
    """
    incidents, key = lake.incidents(), unexplained(lake.pipeline.name)
    wrong = accounts.unexplained()
    if wrong:
        text = _sentence(lake.pipeline, accounts, wrong)
        log.error("unexplained: %s", text)
        incidents.open(key, text, link=link)
    else:
        incidents.close(key, "no kept account has an unexplained difference any more")


def _sentence(pipeline: Pipeline, accounts: Accounts, wrong: Sequence[Mapping[str, Any]]) -> str:
    """The first window that nothing explains, and the number of such windows."""
    first, windows = wrong[0], sum(row["unexplained"] for row in wrong)
    row = accounts.first_unexplained(first["slice"], first["version"])
    example = f", {_window(pipeline, row)}" if row else ""
    return f"slice {first['slice']}{example}; windows with an unexplained difference: {windows}. See docs/drift.md"


def _window(pipeline: Pipeline, row: Mapping[str, Any]) -> str:
    keys = ", ".join(f"{key}={row[key]!r}" for key in pipeline.keys)
    differing = [(name, off) for name, off in row["unexplained"].items() if off != 0]
    values = "; ".join(
        f"{name}: live {_of(row, 'live', name)}, final {_of(row, 'final', name)}"
        + ("" if off is None else f", unexplained {off}")
        for name, off in differing
    )
    return f"window {iso(round(row['window_start'].timestamp() * 1000))}, {keys}: {values}"


def _of(row: Mapping[str, Any], side: str, name: str) -> Any:
    return "no row" if row[side] is None else row[side][name]
