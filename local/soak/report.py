"""The results of a soak, for a terminal."""

from collections.abc import Iterator
from statistics import mean, median

from rich.table import Table

from local.soak.disk import PARTS, Disk
from local.soak.samples import ALLOWED_SECONDS, FINAL_SECONDS, Sample, Soaked


def tables(soaked: Soaked) -> list[Table]:
    """Tables of the tide lines, of the runs' durations, of each minute, and of the disk."""
    disk = [_disk(soaked.disk)] if soaked.disk else []
    return [_lines(soaked), _runs(soaked), _minutes(soaked), *disk]


def verdict(soaked: Soaked) -> Iterator[str]:
    """Sentences about resources and faults, and whether the goals were met."""
    samples, faults = soaked.samples, soaked.faults
    machine, memory = mean(s.machine_cores for s in samples), max(s.memory_bytes for s in samples)
    yield (
        f"CPU: {soaked.cores():.2f} cores on average (the whole machine: {machine:.2f}); "
        f"memory: {memory / 1e6:,.0f} MB at most (PSS)"
    )
    yield from soaked.disk.sentences() if soaked.disk else ()
    for what, found in vars(faults).items():
        yield f"{what.replace('_', ' ')}: {len(found)}"
        yield from (f"  {sentence}" for sentence in found[:20])
    unmet = soaked.unmet()
    yield from (f"MISSED: {sentence}" for sentence in unmet)
    met = "met: every tide line keeps up, and no writer hindered another"
    yield f"logs and lake are kept in {soaked.kept}" if unmet else met


def _lines(soaked: Soaked) -> Table:
    half, end = soaked.at(soaked.minutes / 2), soaked.samples[-1]
    goal = f"age at minute {soaked.minutes:g}, s (goal: at most {ALLOWED_SECONDS:g} more)"
    shown = Table(
        "pipeline", f"age at minute {soaked.minutes / 2:g}, s", goal, "highest age since then, s", title="tide lines"
    )
    for name in ("final slices", "micro-batches", "lag at the end"):
        shown.add_column(name, justify="right")
    for pipeline, age in end.ages.items():
        oldest = max(s.ages[pipeline] for s in soaked.samples if s.seconds >= half.seconds)
        batches = end.batches.get(pipeline, 0) - soaked.samples[0].batches.get(pipeline, 0)
        ages = (f"{half.ages[pipeline]:.0f}", f"{age:.0f}", f"{oldest:.0f}")
        counts = (f"{end.final[pipeline]:,}", f"{batches:,}", f"{end.lags.get(pipeline, 0):,}")
        shown.add_row(pipeline, *ages, *counts)
    return shown


def _runs(soaked: Soaked) -> Table:
    shown = Table("DAG", "newest runs", "median, s", "longest, s", title="batch runs")
    of_slices = {f"{name}: plan to publish (goal ≤ {FINAL_SECONDS:g})": took for name, took in soaked.finals.items()}
    for dag, seconds in {**soaked.runs, **of_slices}.items():
        took = (f"{median(seconds):.0f}", f"{max(seconds):.0f}") if seconds else ("", "")
        shown.add_row(dag, str(len(seconds)), *took)
    return shown


def _minutes(soaked: Soaked) -> Table:
    pipelines = tuple(soaked.samples[-1].ages)
    shown = Table("minute", *(f"{name}, age in s" for name in pipelines), "cores", "machine", "memory, MB")
    for minute in range(1, int(soaked.minutes) + 1):
        of = [s for s in soaked.samples if minute - 1 < s.seconds / 60 <= minute + 0.01]
        if of:
            shown.add_row(str(minute), *(f"{of[-1].ages[name]:.0f}" for name in pipelines), *_taken(of))
    return shown


def _disk(disk: Disk) -> Table:
    """The use of the disk, about once a minute."""
    shown = Table("minute", "rows, MB", "all but rows, MB", title="disk")
    for part in PARTS:
        shown.add_column(f"{part}, MB", justify="right")
        shown.add_column("files", justify="right")
    for minute, use in disk.uses:
        parts = (text for part in PARTS for text in (_mb(use.bytes[part]), f"{use.files[part]:,}"))
        shown.add_row(f"{minute:.1f}", _mb(use.rows_bytes), _mb(use.besides_bytes), *parts)
    return shown


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f}"


def _taken(samples: list[Sample]) -> tuple[str, ...]:
    cores, machine = mean(s.cores for s in samples), mean(s.machine_cores for s in samples)
    return f"{cores:.2f}", f"{machine:.2f}", f"{samples[-1].memory_bytes / 1e6:,.0f}"
