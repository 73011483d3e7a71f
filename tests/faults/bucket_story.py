"""The story of a lake, chapter by chapter: if a process is killed in a chapter, the next process repeats it.

Run `python -m tests.faults.bucket_story PROGRESS` with the environment of a lake in a bucket.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from jobs import session
from jobs.broker import kafka
from jobs.finality import account, checking, rollback
from jobs.lake.final import FinalTable
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines import PIPELINES
from jobs.pipelines.slices import slice_named
from jobs.settings import Settings
from jobs.streaming import ingest, live, reset
from jobs.streaming.reset_plan import Request, To
from jobs.traffic import generator as traffic
from tests import batch

SUM = PIPELINES["rolling_sum"]
COUNT = 400
HOURS = 60


def send_backlog(settings: Settings) -> None:
    """Send sixty hours of clicks at once, each hour in a folder of its own, as a stream finds them after an outage."""
    since = int(time.time() * 1000) - HOURS * 3_600_000
    clicks = traffic.records("clicks", seed=3, count=4 * HOURS, start_ms=since, step_ms=900_000)
    traffic.send(settings.kafka, "clicks", clicks, rate=0)


def send(settings: Settings) -> None:
    """Send two minutes of numbers, some of them late, doubled or broken."""
    now_ms = int(time.time() * 1000)
    dirt = {"late": 0.1, "duplicate": 0.1, "corrupt": 0.05}
    numbers = traffic.records("numbers", seed=now_ms, count=COUNT, start_ms=now_ms - 150_000, step_ms=300, **dirt)
    traffic.send(settings.kafka, "numbers", numbers, rate=0)


def show(settings: Settings) -> None:
    live.run(settings, SUM, until_caught_up=True)


def land(settings: Settings) -> None:
    ingest.run(settings, until_caught_up=True)


def recompute(run: str) -> Callable[[Settings], None]:
    return lambda settings: void(batch.whole(settings, SUM, run))


def restate(settings: Settings) -> None:
    batch.whole(settings, SUM, "restated", slices=[slice_named(SUM, name) for name in slices(settings)])


def roll_back(settings: Settings) -> None:
    name = next(name for name, version in slices(settings).items() if version == 2)
    lake = PipelineLake(settings.lake_root, SUM)
    words = {"run": "back", "reason": "a test", "by": "a test"}
    rollback.roll_back(lake, settings.kafka, name, 1, **words, now_ms=round(time.time() * 1000))


def explain(run: str) -> Callable[[Settings], None]:
    return lambda settings: account.run(PipelineLake(settings.lake_root, SUM), settings, run)


def begin_anew(settings: Settings) -> None:
    with kafka.admin(settings.kafka) as client:
        reset.apply(settings, client, Request(job=SUM.name, to=To.EARLIEST))


def check(settings: Settings) -> None:
    checking.check(PipelineLake(settings.lake_root, SUM), "check")


def slices(settings: Settings) -> dict[str, int]:
    """The final slices, each with its version."""
    final = FinalTable.read(settings.lake_root, SUM)
    assert final is not None
    return {name: header.version for name, header in sorted(final.headers().items())}


def void(_: object) -> None:
    """Drop a value, since a chapter returns nothing."""


CHAPTERS: dict[str, Callable[[Settings], None]] = {
    "a backlog": send_backlog,
    "traffic": send,
    "live": show,
    "landed": land,
    "final": recompute("first"),
    "accounted": explain("first"),
    "more traffic": send,
    "live again": show,
    "landed again": land,
    "restated": restate,
    # Late events may belong to slices that are not final yet.
    "all final": recompute("second"),
    "rolled back": roll_back,
    "accounted again": explain("second"),
    "reset": begin_anew,
    "live anew": show,
    "checked": check,
}


def main(progress: Path) -> None:
    settings = Settings.from_env()
    spark = session.build(settings, "a lake in a bucket")
    told = progress.read_text().splitlines() if progress.exists() else []
    for name, chapter in CHAPTERS.items():
        if name not in told:
            chapter(settings)
            with progress.open("a") as file:
                file.write(f"{name}\n")
    spark.stop()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
