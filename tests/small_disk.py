"""A disk that can be filled: a small file system in memory. Only root can mount it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CHUNK_BYTES = 4096


def can_mount() -> bool:
    """Whether this process may mount a file system."""
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount a folder as a separate disk."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        # Unmount lazily: a process that is about to end may still hold a file open.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """Fill the disk except for ``leave`` bytes, and return the file that takes the space."""
    ballast = disk / f"ballast-{len(list(disk.glob('ballast-*'))) + 1}"
    with ballast.open("wb", buffering=0) as stream:
        try:
            while not leave or shutil.disk_usage(disk).free > leave:
                stream.write(bytes(_CHUNK_BYTES))
        except OSError:
            return ballast
    return ballast
