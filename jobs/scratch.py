"""The temporary folder of a driver, in which Spark and its libraries keep files. Each driver has one of its own.

Java deletes its temporary files when it ends, but not when it is killed. So each start of a driver on this machine
first removes the folders of drivers that have ended. A driver holds a lock on its folder. The kernel releases the lock
when the process has ended, however it ended.
"""

import errno
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from jobs.refusal import Refusal

_LOCK = ".lock"


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """The folder of one driver. Each process that has inherited the descriptor ``lock`` holds the lock."""

    folder: Path
    lock: int

    @property
    def java_option(self) -> str:
        """The option that lets a JVM use the folder. Spark uses it, too, if no setting names its local folders."""
        return f'"-Djava.io.tmpdir={self.folder}"'


@contextmanager
def new_scratch(root: Path) -> Iterator[Scratch]:
    """A folder for a driver that inherits its lock. At the end it is removed, unless the driver still runs."""
    scratch = take_scratch(root)
    try:
        yield scratch
    finally:
        os.close(scratch.lock)
        # If this fails, the next start of a driver removes the folder.
        with suppress(OSError), _alone(scratch.folder.parent):
            _remove_unheld(scratch.folder.parent)


def take_scratch(root: Path) -> Scratch:
    """Make a folder for a driver below ``root``. This process holds its lock until it ends."""
    # On a shared disk, other machines may not see this machine's locks.
    ours = root / socket.gethostname()
    try:
        ours.mkdir(parents=True, exist_ok=True)
        with _alone(ours):
            _remove_unheld(ours)
            folder = Path(tempfile.mkdtemp(dir=ours, prefix="driver-"))
            return Scratch(folder=folder, lock=_locked(folder / _LOCK))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise Refusal(
            f"SPARK_SCRATCH={str(root)!r} cannot be used for temporary files of drivers ({error.strerror}): set it to "
            "a folder on a disk of this machine that this user may write to"
        ) from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process makes or removes folders here. A new folder is not locked for a moment."""
    lock = _locked(folder / _LOCK)
    try:
        yield
    finally:
        os.close(lock)


def _locked(file: Path) -> int:
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _remove_unheld(folder: Path) -> None:
    for each in folder.iterdir():
        if each.is_dir() and not _is_held(each / _LOCK):
            shutil.rmtree(each, ignore_errors=True)


def _is_held(file: Path) -> bool:
    """Whether a process holds a lock. If this cannot be found out, the answer is yes."""
    try:
        with file.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
