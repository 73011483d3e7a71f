"""The folder of a recompute run: what was planned, staged and decided, until it is published or given up.

It lies below the final table, so that publishing moves files within one file system.
"""

import json
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from jobs.connectors.states import Boundary
from jobs.pipelines.slices import Slice, slice_named
from jobs.pipelines.spec import Pipeline
from jobs.refusal import Refusal

# What a human may still publish is kept as long as the source's topic is.
KEPT_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True, kw_only=True)
class Work:
    """One slice of a run: the version that is served now, why it is done, and what it must hold."""

    slice: str
    version: int
    reason: str
    boundary: Boundary
    events: int
    window_events: int
    late: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run does. The same plan gives the same rows: its inputs are pinned."""

    pipeline: str
    run: str
    as_of_ms: int
    fingerprint: str
    topic_id: str
    offsets: Mapping[int, int]
    events_version: int
    work: tuple[Work, ...]
    # Slices that are published, and of which neither the ledger nor the topic knows yet.
    untold: tuple[str, ...] = ()

    @property
    def has_windows(self) -> bool:
        """Whether there is anything to compute: empty slices need no Spark."""
        return any(work.window_events for work in self.work)

    def slices(self, pipeline: Pipeline) -> list[Slice]:
        """The slices, in order."""
        return [slice_named(pipeline, work.slice) for work in self.work]


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps what its tasks hand to each other."""

    path: Path

    @classmethod
    def of(cls, lake_root: Path, pipeline: Pipeline, run: str) -> Self:
        """The folder of a run of a pipeline."""
        return cls(_root(lake_root, pipeline) / re.sub(r"[^\w.-]", "-", run))

    def new_stage(self) -> Path:
        """Where a try stages its rows, a folder per slice: one that was given up may still write into its own."""
        return self.path / f"windows-{uuid.uuid4().hex}"

    @property
    def windows(self) -> Path:
        """Where the rows are that were staged whole."""
        return self.path / str((self._read("staged") or {}).get("windows", "none"))

    def begin(self, plan: Plan) -> None:
        """Write the plan; what an earlier try of the same run left is gone."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        self._write("plan", asdict(plan))

    def plan(self) -> Plan:
        """The plan of this run."""
        read = self._read("plan")
        if read is None:
            raise Refusal(f"run folder {self.path} holds no plan: the run was given up or cleaned away; plan it anew")
        work = tuple(Work(**{**item, "boundary": _boundary(item["boundary"])}) for item in read["work"])
        offsets = {int(partition): end for partition, end in read["offsets"].items()}
        return Plan(**{**read, "work": work, "offsets": offsets, "untold": tuple(read["untold"])})

    def staged(self, events_read: Mapping[str, int], stage: Path | None = None) -> None:
        """Say that all rows are staged, and how many events of each slice were read."""
        self._write("staged", {"events_read": dict(events_read), "windows": stage.name if stage else "none"})

    def events_read(self) -> dict[str, int] | None:
        """How many events of each slice were read; none before the rows are staged."""
        read = self._read("staged")
        return None if read is None else dict(read["events_read"])

    def files(self, slice_: str) -> tuple[Path, ...]:
        """The staged files of a slice."""
        return tuple(sorted((self.windows / f"slice={slice_}").glob("*.parquet")))

    def decide(self, verdicts: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the audit's verdicts, slice by slice."""
        self._write("verdicts", dict(verdicts))

    def verdicts(self) -> dict[str, dict[str, Any]] | None:
        """The audit's verdicts; none before it."""
        return self._read("verdicts")

    def discard(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _write(self, name: str, document: Mapping[str, Any]) -> None:
        new = self.path / f".{name}.new"
        new.write_text(json.dumps(document))
        new.replace(self.path / f"{name}.json")

    def _read(self, name: str) -> dict[str, Any] | None:
        file = self.path / f"{name}.json"
        return dict(json.loads(file.read_text())) if file.exists() else None


def discard_old(lake_root: Path, pipeline: Pipeline, kept: Iterable[str] = ()) -> None:
    """Remove the folders of runs that ended or died long ago."""
    names = {RunFolder.of(lake_root, pipeline, run).path.name for run in kept}
    root = _root(lake_root, pipeline)
    for folder in root.iterdir() if root.is_dir() else ():
        if folder.name not in names and time.time() - folder.stat().st_mtime > KEPT_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _root(lake_root: Path, pipeline: Pipeline) -> Path:
    return lake_root / pipeline.final_table / "_staging"


def _boundary(read: Mapping[str, Any]) -> Boundary:
    return Boundary(topic_id=read["topic_id"], ends={int(p): end for p, end in read["ends"].items()})
