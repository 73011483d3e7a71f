"""The files of a simulated lake, and whether each of them is needed, by the logs of its tables."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from local.bench.year.clock import Clock

# How long after a table's retention its writer deletes files at the latest. The writer of a final table deletes once a
# day. Accounts, which are few, delete at every 50th commit. Other writers delete every hour, at a 50th or 60th commit.
# The library's clock is set once in an hour of the simulation.
_HOUR_SECONDS = 3600
TURN_SECONDS = 3 * _HOUR_SECONDS
_TURNS = dict.fromkeys(("final", "drift", "balance"), 24 * _HOUR_SECONDS + TURN_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The disk use of a part of the lake: regular files, their bytes, and all inodes."""

    files: int = 0
    bytes: int = 0
    inodes: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        """The use of both parts together."""
        return Usage(files=self.files + other.files, bytes=self.bytes + other.bytes, inodes=self.inodes + other.inodes)


@dataclass(frozen=True, kw_only=True)
class Files:
    """Counts of files with rows: files that tables refer to, replaced files that are kept, and files that are too many.

    A missing file is not on the disk, although a table refers to it.
    """

    referred: int = 0
    replaced: int = 0
    too_many: int = 0
    missing: int = 0
    commits: int = 0

    def __add__(self, other: "Files") -> "Files":
        """The numbers of several tables together."""
        return Files(**{name: value + vars(other)[name] for name, value in vars(self).items()})


@dataclass(kw_only=True)
class Follower:
    """Reads each new entry of a table's log, and records the replaced files and the time of their replacement."""

    table: Path
    referred: set[str] = field(default_factory=set)
    replaced: dict[str, float] = field(default_factory=dict)
    version: int = -1
    commits: int = 0

    def follow(self, now: float) -> None:
        """Read the entries since the last call. They count as committed at ``now``, by the simulated clock."""
        while (entry := self.table / "_delta_log" / f"{self.version + 1:020}.json").is_file():
            self.version += 1
            self.commits += 1
            for line in entry.read_text(encoding="utf-8").splitlines():
                self._see(json.loads(line), now)

    def _see(self, action: dict[str, dict[str, str]], now: float) -> None:
        if added := action.get("add"):
            self.referred.add(added["path"])
        if removed := action.get("remove"):
            self.referred.discard(removed["path"])
            self.replaced[removed["path"]] = now

    def files(self, clock: Clock) -> Files:
        """Compare the log with the files on the disk."""
        kept = max(clock.kept.get(str(self.table), {}).values(), default=0)
        turn = _TURNS.get(self.table.parent.name, TURN_SECONDS)
        self.replaced = {file: at for file, at in self.replaced.items() if at >= clock.now - kept - turn}
        there = {f"{file.parent.name}/{file.name}" for file in self.table.glob("*=*/*.parquet")}
        replaced = there & self.replaced.keys() - self.referred
        return Files(
            referred=len(self.referred),
            replaced=len(replaced),
            too_many=len(there - self.referred - replaced),
            missing=len(self.referred - there),
            commits=self.commits,
        )


def usage(root: Path) -> dict[str, Usage]:
    """The use of each kind of table without its log, of all logs, and of all other files."""
    found: dict[str, Usage] = {}
    for folder, below, names in os.walk(root):
        parts = Path(folder).relative_to(root).parts
        kind = "log" if "_delta_log" in parts else parts[0] if parts else "other"
        size = sum(Path(folder, name).lstat().st_size for name in names)
        found[kind] = found.get(kind, Usage()) + Usage(files=len(names), bytes=size, inodes=len(names) + len(below))
    return found


def largest_checkpoint(root: Path) -> int:
    """The largest of the final tables' newest checkpoints, in bytes."""
    logs = (table.glob("_delta_log/*.checkpoint.parquet") for table in root.glob("final/*"))
    newest = (max(found, default=None) for found in logs)
    return max((file.stat().st_size for file in newest if file), default=0)
