"""The disk of a soak: a quota for its lake, the use of the disk, the freed bytes, and whether the use stays flat.

The files with the present rows of tables must grow with the traffic, so they are left out. All other files of the lake
are judged: replaced files, logs of tables, checkpoints, documents, pages and run folders.
"""

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from deltalake import DeltaTable

from jobs.lake.delta.reading import files_with_sizes
from jobs.refusal import Refusal

# Before this minute the use still rises: replaced files and live rows are kept for ten minutes, so few were deleted
# yet.
FLAT_FROM_MINUTE = 20.0
# The highest use in the second half of the time since then may be this many times the highest use in the first half.
# The use rises and falls like a saw.
FLAT_RATIO = 1.1
PARTS = ("lake", "broker", "airflow", "logs")
_FREED = re.compile(r"freed (\d+) bytes of (\w+): (\d+) files")
_SHORT_LIVED = {
    # With the default of six hours, a soak of one hour would delete nothing. A time much shorter than ten minutes would
    # delete files that an account still reads: it reads one version, for minutes on a small machine.
    "REPLACED_FILES_KEPT_MINUTES": "10",
    "LIVE_KEPT_SECONDS": "600",
}


@dataclass(frozen=True, kw_only=True)
class Use:
    """The use of the disk at a moment: bytes and files of each part, and the bytes that the tables refer to."""

    bytes: Mapping[str, int]
    files: Mapping[str, int]
    rows_bytes: int = 0

    @property
    def besides_bytes(self) -> int:
        """The bytes of the lake without the rows that its tables have now."""
        return self.bytes["lake"] - self.rows_bytes


@dataclass(frozen=True, kw_only=True)
class Freed:
    """The bytes and files that the writers of tables have deleted, by their logs."""

    bytes: int = 0
    files: int = 0


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The measured uses of the disk: (minute, use) in order. Without a quota they are shown, but not judged."""

    uses: Sequence[tuple[float, Use]]
    freed: Freed
    quota_bytes: int | None = None

    def unmet(self) -> Iterator[str]:
        """The goals that were missed, a sentence each."""
        if self.quota_bytes is None:
            return
        wanted = self.freed.bytes + self.uses[-1][1].bytes["lake"]
        if wanted <= self.quota_bytes:
            yield (
                f"without upkeep the lake would take {_mb(wanted)}, which fits into the quota of "
                f"{_mb(self.quota_bytes)}, so this soak proves nothing: run it longer, or with a smaller --quota"
            )
        before, after = self._highest()
        if before and after > before * FLAT_RATIO:
            yield (
                f"the lake keeps growing: without the rows of its tables it took up to {_mb(before)} in the first half "
                f"of the time since minute {FLAT_FROM_MINUTE:g}, and up to {_mb(after)} in the second"
            )

    def _highest(self) -> tuple[int, int]:
        """The highest use beside rows, in each half of the judged time; 0 if there are fewer than two uses."""
        since = [(minute, use.besides_bytes) for minute, use in self.uses if minute >= FLAT_FROM_MINUTE]
        if len(since) < 2:
            return 0, 0
        middle = (since[0][0] + since[-1][0]) / 2
        before, after = ([taken for minute, taken in since if (minute > middle) is late] for late in (False, True))
        return max(before), max(after)

    def sentences(self) -> Iterator[str]:
        """The findings as sentences for a terminal."""
        end = self.uses[-1][1]
        parts = ", ".join(f"{part} {_mb(end.bytes[part])} in {end.files[part]:,} files" for part in PARTS)
        yield f"disk at the end: {parts}; {_mb(end.rows_bytes)} of the lake are rows that its tables have"
        quota = f"; the quota is {_mb(self.quota_bytes)}" if self.quota_bytes else ""
        yield (
            f"deleted by the writers of tables: {_mb(self.freed.bytes)} in {self.freed.files:,} files; without this "
            f"the lake would take {_mb(self.freed.bytes + end.bytes['lake'])}{quota}"
        )


def environment_of(quota_mb: int | None) -> dict[str, str]:
    """The settings of a soak on a small disk. Settings of the user take precedence."""
    return {**_SHORT_LIVED, "LAKE_RESERVE_MB": str(max(quota_mb // 20, 1))} if quota_mb else {}


@contextmanager
def disk_of(folder: Path, quota_mb: int | None) -> Iterator[None]:
    """Mount a disk of this many megabytes at a folder. Without a quota, do nothing."""
    if quota_mb is None:
        yield
        return
    if os.geteuid():
        raise Refusal("--quota mounts a small file system, which only root may do: leave it out, or run as root")
    folder.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={quota_mb * 1_000_000}", "tideline-soak", str(folder))
    try:
        yield
    finally:
        _run("umount", "--lazy", str(folder))


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Refusal(f"{' '.join(command)} failed: {done.stderr.strip()}")


def look(home: Path, tables: Iterable[str]) -> Use:
    """Measure the disk use below the home of a platform. ``tables`` are the tables' folders in its lake."""
    sizes = {part: list(_sizes(home / part)) for part in PARTS}
    return Use(
        bytes={part: sum(found) for part, found in sizes.items()},
        files={part: len(found) for part, found in sizes.items()},
        rows_bytes=sum(_rows_bytes(home / "lake" / table) for table in tables),
    )


def _sizes(folder: Path) -> Iterator[int]:
    """The sizes of files on the disk. Files may appear and vanish during the search."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                yield from _sizes(Path(entry.path))
                continue
            with suppress(FileNotFoundError):
                yield entry.stat(follow_symlinks=False).st_blocks * 512


def _rows_bytes(table: Path) -> int:
    """The bytes of a table's rows: 0 for a table that is missing, and for incidents, which are documents."""
    if not (table / "_delta_log").is_dir():
        return 0
    return sum(files_with_sizes(DeltaTable(str(table))).values())


def freed(logs: Path) -> Freed:
    """The sum of all deletions in the logs of drivers and tasks so far."""
    found = [match for file in logs.rglob("*.log") for match in _FREED.finditer(file.read_text(errors="replace"))]
    return Freed(bytes=sum(int(match[1]) for match in found), files=sum(int(match[3]) for match in found))


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"
