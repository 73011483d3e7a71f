"""The folder of a recompute run: its plan, staged rows and verdicts, until they are published or given up.

It lies below the final table, so that publishing moves files within one file system.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import pyarrow as pa

from jobs.control.incidents import report_of
from jobs.finality.run.tries import StagedSlice
from jobs.lake.slices import Boundary, LedgerLine, State
from jobs.pipelines.layout import STAGING
from jobs.pipelines.pipeline import Pipeline
from jobs.pipelines.slices import Slice, slice_named
from jobs.refusal import Refusal
from jobs.storage.documents import UNREADABLE, Report, keep_copy
from jobs.storage.folders import Folder, last_written, make_folder, remove, whole, write_whole
from jobs.storage.parquet import files_in, read, write

if TYPE_CHECKING:
    # Each parse of a DAG file imports this module. The tables need much more time and memory than a folder.
    from jobs.lake.pipeline_lake import PipelineLake

# Rows that a person may still approve are kept as long as the records of the source's topic.
KEPT_SECONDS = 7 * 24 * 3600
_GONE = "gone"
# An ended run's folder stays this long, because Airflow repeats a task that was killed before it reported success.
ENDED_KEPT_SECONDS = 3600
# A pipeline has one run at a time. So if newer runs have planned all slices of a run, that run was killed. It is given
# up when its plan is this old.
REPLACED_KEPT_SECONDS = 3600


@dataclass(frozen=True, kw_only=True)
class Work:
    """One slice of a run: its served version, the reason to compute it, and the counts that it must have."""

    slice: str
    version: int
    reason: str
    boundary: Boundary
    events: int
    window_events: int
    late: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run. Its inputs are pinned, so the same plan gives the same rows."""

    pipeline: str
    run: str
    as_of_ms: int
    fingerprint: str
    # The fingerprint of the checks by which the rows are judged.
    checks: str
    topic_id: str
    offsets: Mapping[int, int]
    events_version: int
    work: tuple[Work, ...]
    # Slices that are published, but not final in the ledger yet. Their messages may be missing in the topic, too.
    unannounced: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its slices."""
        return tuple(work.slice for work in self.work)

    def only(self, slices: Iterable[str]) -> Self:
        """The same plan for a part of its slices."""
        wanted = set(slices)
        return replace(self, work=tuple(work for work in self.work if work.slice in wanted))

    @property
    def has_windows(self) -> bool:
        """Whether there is anything to compute. Empty slices need no Spark."""
        return any(work.window_events for work in self.work)

    def line(
        self,
        work: Work,
        state: State,
        *,
        at_ms: int,
        late: int = 0,
        reason: str | None = None,
        docs: str | None = None,
    ) -> LedgerLine:
        """A line of the ledger about one of its slices. ``late`` is the number of late events that the line holds."""
        return LedgerLine(
            slice=work.slice,
            state=state,
            at_ms=at_ms,
            run=self.run,
            version=work.version + 1,
            fingerprint=self.fingerprint,
            boundary=work.boundary,
            offsets=self.offsets,
            events_version=self.events_version,
            events=work.events,
            late=late,
            checks=self.checks,
            reason=work.reason if reason is None else reason,
            docs=docs,
        )

    def slices(self, pipeline: Pipeline) -> list[Slice]:
        """The slices, in order."""
        return [slice_named(pipeline, work.slice) for work in self.work]


def name_of(run: str) -> str:
    """A run's id as the name of a file or folder. Two ids never give the same name."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', run)[:150]}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class RunFolder:
    """The folder through which the tasks of a run pass data to each other."""

    path: Folder
    report: Report | None = None

    @classmethod
    def of(cls, lake: "PipelineLake", run: str) -> Self:
        """The folder of a run of a pipeline."""
        return cls(_root(lake) / name_of(run), report_of(lake.root))

    def begin(self, plan: Plan) -> None:
        """Write the plan, and end earlier tries by removing their files.

        If this run has replaced windows before, their list stays: tombstones for them may still have to be sent.
        """
        make_folder(self.path)
        for left in self.path.iterdir():
            if left.is_dir() and left.name not in (_GONE, UNREADABLE):
                remove(left)
            # The old plan is not removed but replaced. If the run is killed here, that plan still names its slices.
            elif left.is_file() and left.name != "plan.json":
                left.unlink()
        self._write("plan", asdict(plan))

    def plan(self) -> Plan:
        """The plan of this run."""
        read = self._read("plan")
        if read is None:
            raise Refusal(f"run folder {self.path} holds no plan: it was removed; clear the task plan of the run")
        # Earlier versions of Tideline wrote the key `untold`. A run that such a version has planned goes on after an
        # update.
        return msgspec.convert({"unannounced": read.get("untold", ()), **read}, Plan, str_keys=True)

    def keep_staged(self, staged: Mapping[str, StagedSlice], failed: Mapping[str, str] | None = None) -> None:
        """Record which staged rows the run may publish. ``failed``: slice that could not be computed -> the reason."""
        slices = {name: asdict(slice_) for name, slice_ in staged.items()}
        self._write("staged", {"slices": slices, "failed": dict(failed or {})})

    def staged(self) -> dict[str, StagedSlice] | None:
        """The staged slices; None before all tries are over."""
        read = self._read("staged")
        if read is None or "slices" not in read:
            return None
        return msgspec.convert(read["slices"], dict[str, StagedSlice])

    def failed(self) -> dict[str, str]:
        """The slices that could not be computed, each with the reason."""
        return dict((self._read("staged") or {}).get("failed", {}))

    def stages(self) -> list[Folder]:
        """The folders of the tries from which rows were taken."""
        files = [file for slice_ in (self.staged() or {}).values() for file in slice_.files]
        return [self.path / name for name in sorted({file.partition("/")[0] for file in files})]

    def files_by_slice(self) -> Callable[[str], tuple[Folder, ...]]:
        """Return a function that gives the staged files of a slice.

        The document is read only once, since a run may have thousands of slices.
        """
        staged, earlier = self.staged() or {}, (self._read("staged") or {}).get("windows")

        def files(slice_: str) -> tuple[Folder, ...]:
            if earlier:
                # An earlier version of Tideline wrote this run. A person may still approve a blocked slice of it.
                return tuple(files_in(self.path / str(earlier) / f"slice={slice_}"))
            return tuple(self.path / file for file in staged[slice_].files) if slice_ in staged else ()

        return files

    def keep_verdicts(self, verdicts: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the audit's verdicts, slice by slice."""
        self._write("verdicts", dict(verdicts))

    def verdicts(self) -> dict[str, dict[str, Any]] | None:
        """The audit's verdicts; None before the audit."""
        return self._read("verdicts")

    def keep_replaced_windows(self, slice_: str, windows: pa.Table) -> None:
        """Store the windows of a slice before it is replaced. Those that the next version lacks need tombstones."""
        folder = self.path / _GONE
        make_folder(folder)
        with whole(folder / f"{slice_}.parquet") as new:
            write(windows, new)

    def replaced_windows(self, slice_: str) -> pa.Table | None:
        """The windows that `keep_replaced_windows` has stored; None if it has stored none."""
        file = self.path / _GONE / f"{slice_}.parquet"
        return read(file) if file.is_file() else None

    def end(self) -> None:
        """Mark the run as ended. The folder stays for a while, for a task that Airflow repeats."""
        self._write("ended", {})

    @property
    def left(self) -> set[str]:
        """The slices of its plan; empty when the run has ended."""
        # Another run may remove the folder at this moment.
        with suppress(FileNotFoundError):
            plan = None if self.has_ended else self._read("plan")
            return {work["slice"] for work in plan["work"]} if plan else set()
        return set()

    @property
    def has_ended(self) -> bool:
        """Whether the run has nothing left to do."""
        return (self.path / "ended.json").is_file()

    @property
    def is_over(self) -> bool:
        """Whether the folder is not needed any more: the run ended a while ago, or is so old that it was given up."""
        now = time.time()
        with suppress(FileNotFoundError):
            return now - (self.path / "ended.json").stat().st_mtime > ENDED_KEPT_SECONDS
        return 0 < self.touched < now - KEPT_SECONDS

    @property
    def has_published_nothing(self) -> bool:
        """Whether the run is planned but not audited: nothing of it is published, and nothing can be approved."""
        if not (self.path / "plan.json").is_file() or self.has_ended:
            return False
        return not (self.path / _GONE).is_dir() and not self.verdicts()

    @property
    def touched(self) -> float:
        """When the run was planned or last replaced a slice; 0 if another run removes the folder at this moment."""
        moments = [0.0]
        with suppress(FileNotFoundError):
            moments.append((self.path / "plan.json").stat().st_mtime)
        with suppress(FileNotFoundError):
            moments.append(last_written(self.path / _GONE))
        if not any(moments):
            with suppress(FileNotFoundError):
                moments.append(last_written(self.path))
        return max(moments)

    def _write(self, name: str, document: Mapping[str, Any]) -> None:
        write_whole(self.path / f"{name}.json", json.dumps(document).encode())

    def _read(self, name: str) -> dict[str, Any] | None:
        """Return a document of the run, or None. On a disk, an unreadable document is removed and a copy is kept."""
        file = self.path / f"{name}.json"
        try:
            return dict(json.loads(file.read_text())) if file.is_file() else None
        except ValueError:
            if isinstance(file, Path):
                keep_copy(file, self.report)
                file.unlink(missing_ok=True)
            return None


def slices_left(lake: "PipelineLake", but: RunFolder | None = None) -> set[str]:
    """The slices of runs that have not ended: killed runs, runs that wait for a person, and runs under way.

    ``but``: a run to leave out.
    """
    folders = (folder for folder in _folders(lake) if not but or folder.path != but.path)
    return {slice_ for folder in folders for slice_ in folder.left}


def discard_old(lake: "PipelineLake", *, and_abandoned: bool, but: RunFolder | None = None) -> int:
    """Remove folders of runs that are not needed any more; return how many. The caller holds the job's lease.

    ``but``: the folder of the calling run, which stays.
    """
    over = [path for path in old_runs(lake, and_abandoned=and_abandoned) if not but or path != but.path]
    for folder in over:
        # The plan goes first. If it were left alone by a process that is killed here, the run would look unfinished.
        (folder / "plan.json").unlink(missing_ok=True)
        remove(folder)
    return len(over)


def old_runs(lake: "PipelineLake", *, and_abandoned: bool) -> list[Folder]:
    """The folders of runs that are not needed any more.

    ``and_abandoned``: also those of runs that have not ended for a week, such as killed ones. Only a plan that decides
    about the slices of these runs may ask for this. Example: a slice of last year was restated, and its run was killed.
    Until a plan has taken the slice again, only the folder of the killed run shows that the slice must be computed.
    """
    found = _folders(lake)
    over = [folder for folder in found if folder.is_over and (and_abandoned or folder.has_ended)]
    over += _replaced([folder for folder in found if folder not in over])
    return [folder.path for folder in over]


def _replaced(folders: Iterable[RunFolder]) -> list[RunFolder]:
    """Runs that were killed before their audit, if newer runs have planned all their slices.

    In an outage of days each scheduled run leaves such a folder. The folder of the newest run is enough for the next
    plan to find all their slices.
    """
    planned: set[str] = set()
    found: list[RunFolder] = []
    before = time.time() - REPLACED_KEPT_SECONDS
    # Sorted by the time of the plan, the newest first.
    for touched, folder in sorted(((each.touched, each) for each in folders), key=lambda pair: -pair[0]):
        left = folder.left
        if left <= planned and touched < before and folder.has_published_nothing:
            found.append(folder)
        else:
            planned |= left
    return found


def _folders(lake: "PipelineLake") -> list[RunFolder]:
    """The folders of all runs."""
    root, report = _root(lake), report_of(lake.root)
    return [RunFolder(folder, report) for folder in (root.iterdir() if root.is_dir() else ())]


def _root(lake: "PipelineLake") -> Folder:
    return lake.root / lake.pipeline.final_table / STAGING
