"""Simulate a year of 1-minute slices. Are plans, pages, queries, memory and the disk then as they were after a month?

Three pipelines and their two sources are written by one process each. Then other processes look at the lake, while
no process writes.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Self

from jobs import session
from jobs.broker.kafka import admin, require
from jobs.pipelines import PIPELINES
from jobs.pipelines.days import DAY_MS
from jobs.pipelines.layout import HOUR_MS
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import Slice, slices_between
from jobs.refusal import Refusal
from jobs.settings import Settings
from local.bench.lake import events_schema
from local.bench.year.clock import Clock, simulated
from local.bench.year.files import Files, Follower, Usage, largest_checkpoint, usage
from local.bench.year.reader_process import LOOKS
from local.bench.year.writers import EventsYear, PipelineYear, UpkeepYear, Writer, over_seconds
from local.steps import Tell

YEAR = "year"
DAYS = 365
POINTS = (1, 30, 365)
MINUTE_MS = 60_000
_TELL_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """How many slices share a commit: one shortly before a point, those of an hour before that, else those of a day."""

    one_by_one_minutes: int = 360
    hourly_minutes: int = 2 * 24 * 60
    hour: int = 60
    far: int = 1440

    def steps(self, from_ms: int, to_ms: int) -> Iterator[list[Slice]]:
        """The steps of a stretch that ends at a point."""
        one_ms = max(from_ms, to_ms - self.one_by_one_minutes * MINUTE_MS)
        hour_ms = max(from_ms, to_ms - self.hourly_minutes * MINUTE_MS)
        for begin_ms, end_ms, size in ((from_ms, hour_ms, self.far), (hour_ms, one_ms, self.hour), (one_ms, to_ms, 1)):
            slices = slices_between(_ANY, begin_ms, end_ms)
            yield from (slices[at : at + size] for at in range(0, len(slices), size))


@dataclass(frozen=True, kw_only=True)
class Looked:
    """Looks of one kind, each in a new process: seconds, and the highest memory of the process."""

    seconds: float
    peak_bytes: int
    own_bytes: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """The lake after some days: the use of the disk, and the cost for readers of the slowest pipeline."""

    day: int
    slices: int
    usage: Mapping[str, Usage]
    files: Files
    checkpoint_bytes: int
    looks: Mapping[str, Looked]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Year:
    """The results of a simulated year, with its parameters."""

    points: tuple[Point, ...]
    cadence: Cadence
    pipelines: tuple[str, ...]
    rounds: int


_ANY = next(iter(PIPELINES.values()))


def points_of(days: int) -> list[int]:
    """The days of measurement: the fixed points that are within the run, and its last day."""
    return sorted({day for day in (*POINTS, days) if day <= days})


def run(
    settings: Settings,
    report: Tell,
    *,
    days: int = DAYS,
    pipelines: Sequence[str] = tuple(PIPELINES),
    cadence: Cadence = Cadence(),
    rounds: int = 3,
) -> Year:
    """Simulate the year, and measure at each point. The simulated year ends with yesterday."""
    if any(pipeline.slice_seconds * 1000 != MINUTE_MS for pipeline in PIPELINES.values()):
        raise Refusal("the simulated year needs slice_seconds=60 in the definition of every pipeline")
    chosen = [PIPELINES[name] for name in pipelines]
    end_ms = int(time.time() * 1000) // DAY_MS * DAY_MS
    begin_ms, points = end_ms - days * DAY_MS, list[Point]()
    with ExitStack() as stack:
        first, others = (
            [stack.enter_context(_Process(writer)) for writer in writers]
            for writers in _writers(settings, chosen, begin_ms)
        )
        for last, day in zip([0, *points_of(days)], points_of(days), strict=False):
            began = time.monotonic()
            report(f"year: writing the days {last + 1} to {day}")
            span = begin_ms + last * DAY_MS, begin_ms + day * DAY_MS
            files = _live_until(first, others, *span, cadence, _each_minute(report, begin_ms, days))
            seconds = time.monotonic() - began
            report(f"year: measuring at day {day}")
            points.append(_look(settings, chosen, day, span[1], files, rounds, seconds))
    return Year(points=tuple(points), cadence=cadence, pipelines=tuple(pipelines), rounds=rounds)


def _each_minute(report: Tell, begin_ms: int, days: int) -> Callable[[int], None]:
    """A function that reports the simulated day to which a time belongs, once a minute at most."""
    told = time.monotonic()

    def tell(now_ms: int) -> None:
        nonlocal told
        if time.monotonic() - told > _TELL_SECONDS:
            told = time.monotonic()
            report(f"year: day {(now_ms - begin_ms) // DAY_MS + 1} of {days}")

    return tell


def _live_until(
    pipelines: Sequence["_Process"],
    others: Sequence["_Process"],
    from_ms: int,
    to_ms: int,
    cadence: Cadence,
    progress: Callable[[int], None],
) -> Files:
    """Run all pipelines at the same time, and then the others: `ingest` removes only events that no pipeline needs."""
    found = list[Files]()
    for writers in (pipelines, others):
        with ThreadPoolExecutor(len(writers)) as pool:
            asked = [pool.submit(writer.live_through, from_ms, to_ms, cadence, progress) for writer in writers]
            try:
                wait(asked, return_when=FIRST_EXCEPTION)
                found += [each.result() for each in asked if each.done()]
            except BaseException:
                # One process has failed, or the user has interrupted the run. So the others are killed.
                for writer in writers:
                    writer.kill()
                raise
    return sum(found, Files())


def _writers(settings: Settings, pipelines: Sequence[Pipeline], begin_ms: int) -> tuple[list[Writer], list[Writer]]:
    """The writers of pipelines, and the other writers. Their clocks stand at the begin of the year."""
    sources = {pipeline.source.name: pipeline.source for pipeline in pipelines}
    with admin(settings.kafka) as client:
        topics = require(client, sources)
    with session.opened(settings, "bench") as spark:
        schemas = {name: events_schema(spark, each) for name, each in sources.items()}
    clock = Clock(now=begin_ms / 1000)
    shared: dict[str, Any] = {"settings": settings, "clock": clock, "begin_ms": begin_ms}
    first: list[Writer] = [PipelineYear(pipeline=each, topic=topics[each.source.name], **shared) for each in pipelines]
    others: list[Writer] = [
        EventsYear(source=each, topic=topics[name], schema=schemas[name], **shared) for name, each in sources.items()
    ]
    return first, [*others, UpkeepYear(settings=settings, clock=clock)]


def _look(
    settings: Settings, pipelines: Sequence[Pipeline], day: int, end_ms: int, files: Files, rounds: int, seconds: float
) -> Point:
    """Take all kinds of looks at each pipeline in turn. For each kind, the slowest pipeline counts."""
    looks: dict[str, Looked] = {}
    root = Path(str(settings.lake_root))
    for kind in LOOKS:
        each = [_looked(settings, kind, pipeline, _now_ms(end_ms), rounds) for pipeline in pipelines]
        looks[kind] = max(each, key=lambda looked: looked.seconds)
    return Point(
        day=day,
        slices=len(pipelines) * day * DAY_MS // MINUTE_MS,
        usage=usage(root),
        files=files,
        checkpoint_bytes=largest_checkpoint(root),
        looks=looks,
        seconds=seconds,
    )


def _now_ms(end_ms: int) -> int:
    """The time when the slices that end at a point are over for every pipeline, but no later slices are."""
    last = slices_between(_ANY, end_ms - 1, end_ms)[0]
    return round(max(over_seconds(pipeline, last) for pipeline in PIPELINES.values()) * 1000)


def _looked(settings: Settings, kind: str, pipeline: Pipeline, now_ms: int, rounds: int) -> Looked:
    with tempfile.TemporaryDirectory(prefix="tideline-bench-airflow-") as airflow:
        env = {**os.environ, **settings.kafka.as_env(), "LAKE_ROOT": str(settings.lake_root), "AIRFLOW_HOME": airflow}
        command = [sys.executable, "-m", "local.bench.year.reader_process", kind, pipeline.name, str(now_ms)]
        answers = [_answer(command, env) for _ in range(rounds)]
    return Looked(
        seconds=median(each["seconds"] for each in answers),
        peak_bytes=round(median(each["peak_bytes"] for each in answers)),
        own_bytes=round(median(each["peak_bytes"] - each["before_bytes"] for each in answers)),
    )


def _answer(command: Sequence[str], env: Mapping[str, str]) -> dict[str, float]:
    ran = subprocess.run(command, env=dict(env), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise Refusal(f"a measurement of the simulated lake failed: {ran.stderr[-3000:]}")
    answer: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return answer


class _Process:
    """A writer in its own process, since the clock of that process is patched."""

    def __init__(self, writer: Writer) -> None:
        spawning = get_context("spawn")
        self._pipe, self._other = spawning.Pipe()
        self._process = spawning.Process(target=_write_a_year, args=(self._other, writer), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        # Otherwise this process would not notice that the writer has ended.
        self._other.close()
        return self

    def live_through(self, from_ms: int, to_ms: int, cadence: Cadence, progress: Callable[[int], None]) -> Files:
        """Make the commits of some days. Return the numbers of its tables' files afterwards."""
        self._pipe.send((from_ms, to_ms, cadence))
        try:
            while isinstance(answer := self._pipe.recv(), int):
                progress(answer)
        except EOFError:
            answer = "a process that writes the simulated year has ended"
        if not isinstance(answer, Files):
            raise Refusal(str(answer))
        return answer

    def kill(self) -> None:
        """Kill the process. It has no data that is needed."""
        self._process.kill()

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.join()


def _write_a_year(pipe: Connection, writer: Writer) -> None:
    # Ctrl-C is ignored here, because the process that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    begin_ms = round(writer.clock.now * 1000)
    # A pipeline leaves out the newest slice. So at each point this slice is landed and due, and a plan finds it.
    lag_ms = MINUTE_MS if isinstance(writer, PipelineYear) else 0
    root = Path(str(writer.settings.lake_root))
    followers = [Follower(table=root / name) for name in writer.tables()]
    logging.getLogger("jobs").setLevel(logging.WARNING)
    with simulated(writer.clock):
        while True:
            try:
                from_ms, to_ms, cadence = pipe.recv()
            except EOFError:
                return
            try:
                steps = cadence.steps(max(begin_ms, from_ms - lag_ms), to_ms - lag_ms)
                pipe.send(_live_through(writer, followers, steps, pipe.send))
            except Exception:
                pipe.send(traceback.format_exc())


def _live_through(
    writer: Writer, followers: Sequence[Follower], steps: Iterable[Sequence[Slice]], progress: Callable[[int], None]
) -> Files:
    clock = writer.clock
    for slices in steps:
        progress(slices[0].start_ms)
        clock.now = _now_ms(slices[-1].end_ms) / 1000
        # Once in an hour, or once in a longer step.
        if len(slices) > 1 or slices[0].start_ms % HOUR_MS == 0:
            for follower in followers:
                clock.keep_as_long(follower.table)
            writer.open()
        writer.step(slices)
        for follower in followers:
            follower.follow(clock.now)
    return sum((follower.files(clock) for follower in followers), Files())
