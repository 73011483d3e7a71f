"""One side of a race: a warm Spark session that drains a workload for each line on stdin, and prints the seconds.

`local.bench.run` starts it as `python -m local.bench.worker {ours,plain} WORKLOAD FOLDER`, settings in the environment.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from jobs import session
from jobs.pipelines import INGEST, PIPELINES
from jobs.settings import PROJECT, Settings
from jobs.streaming import ingest, live
from local.bench import plain as bench_plain


def _ours(workload: str, settings: Settings, folder: Path) -> Callable[[], None]:
    # The jobs use an existing session and leave it open. So it stays warm, like the session of the other side.
    session.build(settings, "race")
    if workload == INGEST:
        return lambda: ingest.run(settings, until_caught_up=True)
    return lambda: live.run(settings, PIPELINES[workload], until_caught_up=True)


def _plain(workload: str, settings: Settings, folder: Path) -> Callable[[], None]:
    logging = PROJECT / "jobs" / "log4j2.properties"
    spark = bench_plain.session(settings.jars / "spark", settings.driver_memory, logging)
    return lambda: bench_plain.drain(spark, workload, settings.kafka.bootstrap, folder)


def main() -> None:
    """Drain once for each line on stdin."""
    side, workload, folder = sys.argv[1:]
    drain = {"ours": _ours, "plain": _plain}[side](workload, Settings.from_env(), Path(folder))
    for _ in sys.stdin:
        began = time.monotonic()
        drain()
        print(f"seconds={time.monotonic() - began}", flush=True)


if __name__ == "__main__":
    main()
