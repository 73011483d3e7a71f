"""What lies on the disk for a simulated lake, and whether it has to: by the logs of its tables, read by hand."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from local.bench.year.clock import Clock

# How much later than the retention of a table its writer deletes at the latest. The final table's does so once a day.
# Accounts, which are few, do so beside every 50th commit, other writers every hour beside a 50th or 60th; and the
# library's clock is set once in an hour of the simulation.
_HOUR_SECONDS = 3600
TURN_SECONDS = 3 * _HOUR_SECONDS
_TURNS = dict.fromkeys(("final", "drift", "balance"), 24 * _HOUR_SECONDS + TURN_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Of a part of the lake: regular files, their bytes, and all that takes an inode."""

    files: int = 0
    bytes: int = 0
    inodes: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        """Both together."""
        return Usage(files=self.files + other.files, bytes=self.bytes + other.bytes, inodes=self.inodes + other.inodes)


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files with rows: those that tables refer to, those that were replaced and are kept, and what is too much."""

    referred: int = 0
    replaced: int = 0
    too_many: int = 0
    missing: int = 0
    commits: int = 0

    def __add__(self, other: "Files") -> "Files":
        """Of several tables."""
        return Files(**{name: value + vars(other)[name] for name, value in vars(self).items()})


@dataclass(kw_only=True)
class Follower:
    """Reads each new entry of a table's log, so that it knows what was replaced, and when."""

    table: Path
    referred: set[str] = field(default_factory=set)
    replaced: dict[str, float] = field(default_factory=dict)
    version: int = -1
    commits: int = 0

    def follow(self, now: float) -> None:
        """Read what is new, all of it committed since the last call, which is now by the simulated clock."""
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
        """Compare with the disk."""
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
    """Of each kind of table, without its log; of the logs; and of all else."""
    found: dict[str, Usage] = {}
    for folder, below, names in os.walk(root):
        parts = Path(folder).relative_to(root).parts
        kind = "log" if "_delta_log" in parts else parts[0] if parts else "other"
        found[kind] = found.get(kind, Usage()) + _of_files(Path(folder), names) + Usage(inodes=len(below))
    return found


def largest_checkpoint(root: Path) -> int:
    """The bytes of the newest checkpoint of the log of a final table, of the largest one."""
    logs = (table.glob("_delta_log/*.checkpoint.parquet") for table in root.glob("final/*"))
    newest = (max(found, default=None) for found in logs)
    return max((file.stat().st_size for file in newest if file), default=0)


def _of_files(folder: Path, names: list[str]) -> Usage:
    sizes = list(_sizes(folder, names))
    return Usage(files=len(sizes), bytes=sum(sizes), inodes=len(sizes))


def _sizes(folder: Path, names: list[str]) -> Iterator[int]:
    return ((folder / name).lstat().st_size for name in names)
