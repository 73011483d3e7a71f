"""One look at the simulated year by a reader, in its own process: how long it takes, and how much memory.

The benchmark starts it as `python -m local.bench.year.reader_process {plan,page,query,newest} PIPELINE NOW_MS`, with
the settings in the environment. It prints one line of JSON.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from jobs.broker.kafka import admin
from jobs.finality import planning
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines import PIPELINES
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import slice_at
from jobs.query.lake import Lake
from jobs.refusal import Refusal
from jobs.settings import Settings

PLAN, PAGE, QUERY, NEWEST = LOOKS = ("plan", "page", "query", "newest")
_STATUS = Path("/proc/self/status")


def measure(kind: str, pipeline: Pipeline, now_ms: int) -> dict[str, float]:
    """The seconds of one look, without loading code, and the highest memory of the process."""
    settings = Settings.from_env()
    with admin(settings.kafka) as client:

        def plan() -> object:
            lake = PipelineLake(settings.lake_root, pipeline)
            return planning.Planner(lake=lake, client=client, clock=lambda: now_ms).preview().plan.work

        if kind == PLAN:
            return _timed(plan)
    if kind == PAGE:
        # The stack must not import the console. So it is loaded by name, and called like the API server calls it.
        page = import_module("tideline_airflow.console.slices")
        return _timed(lambda: page.slices(pipeline))
    lake = Lake(settings.lake_root)
    return _timed(lambda: lake.query(sql_of(kind, pipeline, now_ms)).num_rows)


def sql_of(kind: str, pipeline: Pipeline, now_ms: int) -> str:
    """The SQL of a look: the first query of README, or a query of the newest final slice."""
    if kind == QUERY:
        return f"select * from {pipeline.name} order by window_start desc limit 5"
    newest = slice_at(pipeline, now_ms - 3 * pipeline.slice_seconds * 1000)
    return f"SELECT * FROM {pipeline.name} WHERE window_start >= make_timestamptz({newest.start_ms * 1000})"


def _timed(look: Callable[[], object]) -> dict[str, float]:
    before, began = peak_bytes(), time.perf_counter()
    if not look():
        raise Refusal("the answer is empty: the simulated lake has no such slice or row")
    return {"seconds": time.perf_counter() - began, "before_bytes": before, "peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    """The highest memory of this process so far. The kernel's other counter starts at the value of the parent."""
    if _STATUS.exists():
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Take one look and print the result."""
    kind, name, now_ms = sys.argv[1:]
    print(json.dumps(measure(kind, PIPELINES[name], int(now_ms))))


if __name__ == "__main__":
    main()
