"""A folder of the lake, on a disk or in a bucket of an object store: what both cannot be told in the same words.

All else they can: whoever has a folder looks, reads and writes by the methods of `pathlib`, which both kinds have.
"""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from jobs.refusal import Refusal

if TYPE_CHECKING:
    from jobs.storage.bucket import Bucket

    Folder: TypeAlias = Path | Bucket
else:
    # The other kind is loaded where the lake is of that kind.
    Folder = Path


def folder_at(root: str) -> Folder:
    """What a setting names: a path, `file://path`, or `s3a://bucket/path`, of which `s3://` is another name."""
    if in_bucket := re.fullmatch(r"s3a?://([^/]+(?:/.*?)?)/*", root):
        from jobs.storage.bucket import Bucket

        bucket, _, key = in_bucket[1].partition("/")
        return Bucket(bucket, key)
    path = re.sub(r"^file:(//)?", "", root)
    if re.match(r"\w+:", path):
        raise Refusal(f"LAKE_ROOT={root!r}: a path, file://path or s3a://bucket/path can hold the lake")
    return Path(path).expanduser().resolve()


def place(file: Folder, target: Folder, *, keep: bool = False) -> None:
    """Put a whole file where it is to stay; ``keep``: it stays where it is, too. In a bucket it always does.

    Its time of change becomes now: a deletion must know when a file was placed, not when it was staged.
    """
    if isinstance(file, Path):
        os.utime(file)
        Path(str(target)).hardlink_to(file) if keep else file.rename(str(target))
    else:
        file.copy_to(_too(target))


def make_durable(*paths: Folder) -> None:
    """Keep files, and the names in folders, through a power cut. A bucket keeps all that it has taken.

    A file is durable when its content is, and the name in its folder, too.
    """
    for path in paths:
        if isinstance(path, Path):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            except OSError as error:
                # Some network file systems cannot be asked this of a folder: they keep names by themselves.
                if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
                    raise
            finally:
                os.close(descriptor)


def make_folder(folder: Folder) -> None:
    """Make a folder and those above it, if need be; on a disk their names are durable."""
    if not isinstance(folder, Path) or folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    make_durable(folder.parent)


@contextmanager
def whole(file: Folder, *, durable: bool = True) -> Iterator[Folder]:
    """Where to write a file, or to write it anew, so that a reader sees all of it or what was there before."""
    if not isinstance(file, Path):
        # Nothing of a file is there before its end is written.
        yield file
        return
    new = _beside(file)
    try:
        yield new
        if durable:
            make_durable(new)
        new.replace(file)
        if durable:
            make_durable(file.parent)
    finally:
        new.unlink(missing_ok=True)


def create_whole(file: Path, content: bytes) -> bool:
    """Write a small file on a disk as a whole, unless it is there already; whether it was written now."""
    new = _beside(file)
    try:
        new.write_bytes(content)
        make_durable(new)
        file.hardlink_to(new)
        make_durable(file.parent)
    except FileExistsError:
        return False
    finally:
        new.unlink(missing_ok=True)
    return True


def _beside(file: Path) -> Path:
    """A name that listings pass over."""
    return file.with_name(f".{file.name}.{uuid.uuid4().hex}")


def write_whole(file: Folder, content: bytes, *, durable: bool = True) -> None:
    """Write a small file as a whole."""
    with whole(file, durable=durable) as new:
        new.write_bytes(content)


def remove(folder: Folder) -> None:
    """Remove a folder with all that is in it, as far as that can be done now; nobody may rely on it."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(OSError):
        folder.remove()


def delete_files(files: Collection[Folder]) -> None:
    """Delete files of one lake; a file that is gone already is no error."""
    in_bucket = []
    for file in files:
        if isinstance(file, Path):
            file.unlink(missing_ok=True)
        else:
            in_bucket.append(file)
    if in_bucket:
        in_bucket[0].delete_with(in_bucket[1:])


def move(folder: Folder, target: Folder) -> None:
    """Move a folder: at once on a disk; in a bucket file by file, and nothing is gone before all of it is there."""
    if isinstance(folder, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(str(target))
        return
    for file in folder.written():
        file.copy_to(_too(target / str(file.relative_to(folder))))
    folder.remove()


def written(folder: Folder) -> dict[Folder, float]:
    """The files in a folder, and when each was written, in seconds since 1970."""
    if not isinstance(folder, Path):
        return {file: seen.st_mtime for file, seen in folder.written().items() if file.parent == folder}
    found: dict[Folder, float] = {}
    for file in folder.iterdir() if folder.is_dir() else ():
        # Others may remove what lies here.
        with suppress(FileNotFoundError):
            if file.is_file():
                found[file] = file.stat().st_mtime
    return found


def last_written(folder: Folder) -> float:
    """When something was put into a folder last; of one in a bucket that is not there, at no time."""
    if isinstance(folder, Path):
        return folder.stat().st_mtime
    return max((seen.st_mtime for seen in folder.written().values()), default=0.0)


def _too(folder: Folder) -> "Bucket":
    """Both lie in one lake, so what is in a bucket stays in it."""
    if isinstance(folder, Path):
        raise TypeError(f"{folder} is not in a bucket")
    return folder
