"""The state of a folder after a power cut: durable content is kept, and the rest is in the worst possible state.

This module watches every fsync of this process. The power may fail at each of them, in three ways:
- Only durable content is left.
- All files are there by name, but only half of any content that was not durable.
- The same, but files that replaced others are whole.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jobs.storage import folders

# A file by its number on the disk; a folder by its names, each with the number of a file or folder.
Names = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The state of the disk at one moment. ``reported``: the steps of the work that had been reported as done."""

    reported: Sequence[str]
    root: int
    folders: Mapping[int, Names]
    files: Mapping[int, bytes]
    written: Mapping[str, bytes]
    replaced: Mapping[str, bytes]

    def leave_what_was_durable(self, target: Path) -> None:
        """Leave only the durable content."""
        self._leave(self.root, target)

    def leave_half_of_the_rest(self, target: Path) -> None:
        """Leave all files by name, but half of any content that was not durable: names may reach the disk first."""
        for name, content in self.written.items():
            file = target / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)

    def leave_half_of_what_was_new(self, target: Path) -> None:
        """Do the same, but leave files that replaced older ones whole, as a disk may write these first."""
        self.leave_half_of_the_rest(target)
        for name, content in self.replaced.items():
            (target / name).write_bytes(content)

    def _leave(self, folder: int, target: Path) -> None:
        target.mkdir()
        for name, number in self.folders.get(folder, {}).items():
            if number in self.files or number not in self.folders:
                # A name is an empty file if its content was never made durable.
                (target / name).write_bytes(self.files.get(number, b""))
            else:
                self._leave(number, target / name)


@dataclass
class Disk:
    """The durable content below a folder, as far as this process has synced it."""

    root: Path
    reported: list[str] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    _folders: dict[int, Names] = field(default_factory=dict)
    _files: dict[int, bytes] = field(default_factory=dict)
    # Open descriptors by number: otherwise the number of a removed file or folder would be given to another one.
    _open: dict[int, int] = field(default_factory=dict)

    def done(self, step: str) -> None:
        """Note that a step was reported as done: from now on no power cut may undo it."""
        self.reported.append(step)
        self._cut()

    def begin(self) -> None:
        """Forget the cuts so far: the work to be judged begins here, and all before it is as if reported as done."""
        self.cuts.clear()

    def sync(self, descriptor: int) -> None:
        """Note what a call of `os.fsync` makes durable; the power may fail just before it."""
        self._cut()
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not path.is_relative_to(self.root):
            return
        number = os.fstat(descriptor).st_ino
        self._keep_number(number, path)
        if path.is_dir():
            self._folders[number] = {entry.name: entry.inode() for entry in os.scandir(path)}
            for entry in os.scandir(path):
                self._keep_number(entry.inode(), Path(entry.path))
                if entry.is_dir():
                    self._folders.setdefault(entry.inode(), {})
        else:
            self._files[number] = path.read_bytes()

    def _keep_number(self, number: int, path: Path) -> None:
        if number not in self._open:
            self._open[number] = os.open(path, os.O_PATH)

    def _cut(self) -> None:
        self.cuts.append(
            Cut(
                reported=tuple(self.reported),
                root=self.root.stat().st_ino,
                folders=dict(self._folders),
                files=dict(self._files),
                written={str(file.relative_to(self.root)): self._half(file) for file in self._all()},
                # The only file that the Delta library overwrites.
                replaced={str(f.relative_to(self.root)): f.read_bytes() for f in self.root.rglob("_last_checkpoint")},
            )
        )

    def _all(self) -> Iterator[Path]:
        return (file for file in self.root.rglob("*") if file.is_file())

    def _half(self, file: Path) -> bytes:
        content = file.read_bytes()
        return self._files.get(file.stat().st_ino, content[: len(content) // 2])

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._open.values():
            os.close(descriptor)


@contextmanager
def watched(root: Path) -> Iterator[Disk]:
    """Watch a folder on a disk that may lose power at any moment."""
    root.mkdir(parents=True)
    disk, real = Disk(root), os.fsync

    def fsync(descriptor: int) -> None:
        disk.sync(descriptor)
        real(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        try:
            yield disk
        finally:
            disk.close()


Way = Callable[[Cut, Path], None]
Work = Callable[[Path, Disk], None]
Judge = Callable[[Path, Sequence[str]], None]
WAYS = pytest.mark.parametrize(
    "way",
    [Cut.leave_what_was_durable, Cut.leave_half_of_the_rest, Cut.leave_half_of_what_was_new],
    ids=["lost", "half", "half, hint whole"],
)


def cuts_of(root: Path, work: Work) -> list[Cut]:
    """Do a work in a new lake below a folder; return the states that a power cut may leave."""
    with watched(root) as disk:
        folders.make_folder(root / "lake")
        work(root / "lake", disk)
    return disk.cuts


def judge_cuts(tmp_path: Path, way: Way, work: Work, judge: Judge) -> int:
    """Judge the lake that each power cut leaves, and the steps reported before it. Return the number of cuts.

    A cut that leaves the same as the cut before it is not judged again.
    """
    cuts, seen = cuts_of(tmp_path / "disk", work), None
    for number, cut in enumerate(cuts):
        left = tmp_path / f"left-{number}"
        way(cut, left)
        (left / "lake").mkdir(exist_ok=True, parents=True)
        before, seen = seen, (cut.reported, _contents(left))
        if seen == before:
            continue
        try:
            judge(left / "lake", cut.reported)
        except Exception as error:
            error.add_note(f"the power failed at moment {number}, after {cut.reported[-1:]}; see {left}")
            raise
    return len(cuts)


def _contents(root: Path) -> dict[str, bytes | None]:
    """Each folder and file below a folder, and the contents of the files."""
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}
