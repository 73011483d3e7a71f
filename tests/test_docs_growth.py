"""The chapter about growth lists each thing that grows, with the bound that the code keeps."""

import re

import pytest

from jobs.finality.run.folder import ENDED_KEPT_SECONDS, KEPT_SECONDS
from jobs.lake.delta.fenced import HOUR_SECONDS, STAGE_KEPT_SECONDS
from jobs.pipelines.pipeline import Pipeline
from jobs.settings import PROJECT, KeptDays
from jobs.upkeep.logs import LOG_BYTES
from jobs.upkeep.old_files import ASIDE_KEPT_SECONDS, HALF_WRITTEN_KEPT_SECONDS
from local.platform.stack import _OWN_FOLDERS
from tests import pages

_DAY = 24 * HOUR_SECONDS
_TRIGGER = "plugins/tideline_airflow/triggers/streaming.py"
_OPERATOR = "plugins/tideline_airflow/operators/streaming.py"


def in_code(file: str, name: str) -> float:
    """A number of the plugin, which is not imported here, since that would start Airflow."""
    (value,) = re.findall(rf"^{name} = ([\d.]+)$", (PROJECT / file).read_text(), re.MULTILINE)
    return float(value)


def days(seconds: float) -> str:
    return {1: "a day"}.get(round(seconds / _DAY), f"{seconds / _DAY:.0f} days")


def hours(seconds: float) -> str:
    return {1: "an hour"}.get(round(seconds / HOUR_SECONDS), f"{seconds / HOUR_SECONDS:.0f} hours")


# How the first cell of a row begins, and what its second cell says.
BOUNDS = {
    "closed incidents": f"`INCIDENTS_KEPT_DAYS` ({KeptDays.incidents})",
    "copies of unreadable documents": "the same",
    "files that were put aside": days(ASIDE_KEPT_SECONDS),
    "half-written files": days(HALF_WRITTEN_KEPT_SECONDS),
    "messages in output topics": f"`output_kept_days` ({Pipeline.output_kept_days})",
    "pages about audits and checks": days(KEPT_SECONDS),
    "folder of a recompute run": hours(ENDED_KEPT_SECONDS),
    "… any other": days(KEPT_SECONDS),
    "stages of a batch writer": days(STAGE_KEPT_SECONDS),
    "logs of Airflow's tasks": f"`LOGS_KEPT_DAYS` ({KeptDays.logs})",
    "log of a stream's task": f"a line {hours(in_code(_TRIGGER, '_LOG_SECONDS'))}",
    "logs of drivers": f"the newest {in_code(_OPERATOR, '_KEPT_LOGS'):.0f} of each stream; at {LOG_BYTES // 10**6} MB",
    "temporary folders of drivers (`scratch`)": "go when their driver has ended",
    "logs of the platform's parts": f"{LOG_BYTES // 10**6} MB",
    "rows of runs, their tasks": "`AIRFLOW_KEPT_DAYS` (30) after the run's end",
    "asset events in Airflow's database": "the same",
}


@pytest.mark.parametrize("thing", BOUNDS)
def test_what_grows_beside_the_tables_has_its_bound_and_who_keeps_it(thing: str) -> None:
    (row,) = [row for row in pages.table("operations.md", "Growth", "thing").rows if row[0].startswith(thing)]
    _, bound, owner = row
    assert BOUNDS[thing] in bound
    assert owner


def test_every_folder_of_the_platform_is_listed() -> None:
    """A new folder is a new place that may grow."""
    assert set(pages.table("operations.md", "Folders", "folder").names) == {*_OWN_FOLDERS, "jars"}


def test_a_live_table_is_bounded_by_its_accounts_and_the_page_says_what_a_paused_one_does() -> None:
    rows = pages.table("operations.md", "Growth", "table").rows
    bound = next(bound for table, bound, *_ in rows if table == "`live/PIPELINE`")
    assert bound == "`LIVE_KEPT_SECONDS` after their slice, once it is final and accounted for"
    assert (
        "While one of them is paused, or a slice stays blocked, `live` grows."
        in pages.page("operations.md").read_text()
    )
