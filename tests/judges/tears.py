"""The file operations of the product's own code: a process may be killed before each, and in the middle of a write.

A killed process does nothing more: its cleanup does not run either.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.storage import folders

_NAMES = ("write_bytes", "replace", "hardlink_to", "unlink", "mkdir", "rename", "rmdir")


@dataclass
class Tears:
    """Counts down file operations until this process is killed; with ``left=None`` it is not.

    ``done`` names the operations so far.
    """

    root: Path
    die: Callable[[], BaseException]
    left: int | None = None
    is_dead: bool = False
    done: list[str] = field(default_factory=list)

    def operate(self, name: str, path: Path) -> bool:
        """Whether the process is killed at this operation."""
        if not path.is_relative_to(self.root):
            return False
        if self.is_dead:
            raise self.die()
        self.done.append(f"{name} {path.name}")
        if self.left is None:
            return False
        self.left -= 1
        self.is_dead = self.left < 0
        return self.is_dead

    def reach(self, name: str, path: Path) -> None:
        """Kill the process if this is the chosen operation."""
        if self.operate(name, path):
            raise self.die()

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of `Path` so that the process may be killed at it. A killed write leaves half the content."""

        def method(path: Path, *arguments: Any, **more: Any) -> Any:
            if self.operate(name, path):
                if name == "write_bytes":
                    content = arguments[0]
                    real(path, content[: len(content) // 2])
                raise self.die()
            return real(path, *arguments, **more)

        return method


@contextmanager
def torn(root: Path, die: Callable[[], BaseException]) -> Iterator[Tears]:
    """Watch the file operations below a folder, and kill the process at one of them."""
    tears = Tears(root, die)
    with pytest.MonkeyPatch.context() as patch:
        for name in _NAMES:
            patch.setattr(Path, name, tears.wrapped(name, getattr(Path, name)))
        patch.setattr(folders, "shutil", SimpleNamespace(rmtree=_remove))
        yield tears


def _remove(folder: Path, *, ignore_errors: bool) -> None:
    """Stand in for `shutil.rmtree`, file after file."""
    assert ignore_errors
    with suppress(OSError):
        for entry in sorted(os.listdir(folder)):
            path = folder / entry
            _remove(path, ignore_errors=True) if path.is_dir() else path.unlink()
        folder.rmdir()
