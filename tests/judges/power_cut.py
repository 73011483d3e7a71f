"""What a power cut leaves of a folder: of all that was written, what was made durable, and the rest as bad as can be.

Every fsync of this process is watched. At each of them the power may fail, in three ways: nothing is left that was not
made durable; the names of all files are there, and half of what is in them; or that, and files that replace others are
whole.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

# A file by its number on the disk; a folder by the names in it, each with the number of what it names.
Names = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The state of the disk at one moment; ``steps`` is how much of the work had been reported as done."""

    steps: int
    root: int
    folders: Mapping[int, Names]
    files: Mapping[int, bytes]
    written: Mapping[str, bytes]
    replaced: Mapping[str, bytes]

    def leave_what_was_durable(self, target: Path) -> None:
        """Nothing else is there."""
        self._leave(self.root, target)

    def leave_half_of_the_rest(self, target: Path) -> None:
        """The names of files came to the disk before what is in them."""
        for name, content in self.written.items():
            file = target / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)

    def leave_half_of_what_was_new(self, target: Path) -> None:
        """As above, but files that have taken the place of older ones are whole, as a disk may write them first."""
        self.leave_half_of_the_rest(target)
        for name, content in self.replaced.items():
            (target / name).write_bytes(content)

    def _leave(self, folder: int, target: Path) -> None:
        target.mkdir()
        for name, number in self.folders.get(folder, {}).items():
            if number in self.files or number not in self.folders:
                # A name whose content was never made durable is an empty file.
                (target / name).write_bytes(self.files.get(number, b""))
            else:
                self._leave(number, target / name)


@dataclass
class Disk:
    """What is durable below a folder, as far as this process has asked for it."""

    root: Path
    steps: int = 0
    cuts: list[Cut] = field(default_factory=list)
    _folders: dict[int, Names] = field(default_factory=dict)
    _files: dict[int, bytes] = field(default_factory=dict)
    # Kept open: the number of a file that is removed would be given to another one.
    _open: list[int] = field(default_factory=list)

    def done(self) -> None:
        """Something was reported as done: no power cut may undo it from now on."""
        self.steps += 1
        self._cut()

    def sync(self, descriptor: int) -> None:
        """What `os.fsync` does."""
        self._cut()
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not path.is_relative_to(self.root):
            return
        number = os.fstat(descriptor).st_ino
        self._open.append(os.dup(descriptor))
        if path.is_dir():
            self._folders[number] = {entry.name: entry.inode() for entry in os.scandir(path)}
            for entry in os.scandir(path):
                if entry.is_dir():
                    self._folders.setdefault(entry.inode(), {})
        else:
            self._files[number] = path.read_bytes()

    def _cut(self) -> None:
        self.cuts.append(
            Cut(
                steps=self.steps,
                root=self.root.stat().st_ino,
                folders=dict(self._folders),
                files=dict(self._files),
                written={str(file.relative_to(self.root)): self._half(file) for file in self._all()},
                # The only file that the Delta library writes anew.
                replaced={str(f.relative_to(self.root)): f.read_bytes() for f in self.root.rglob("_last_checkpoint")},
            )
        )

    def _all(self) -> Iterator[Path]:
        return (file for file in self.root.rglob("*") if file.is_file())

    def _half(self, file: Path) -> bytes:
        content = file.read_bytes()
        return self._files.get(file.stat().st_ino, content[: len(content) // 2])

    def close(self) -> None:
        """Let go of all files."""
        for descriptor in self._open:
            os.close(descriptor)


@contextmanager
def watched(root: Path) -> Iterator[Disk]:
    """A folder whose disk may lose its power at any moment."""
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
