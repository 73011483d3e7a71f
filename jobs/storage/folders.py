"""A folder of the lake, on a disk or in a bucket of an object store: the operations that differ between the two.

All other operations are methods, such as `glob`. `Path` has them already, and `Bucket` defines methods with the same
names.
"""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from jobs.refusal import Refusal

if TYPE_CHECKING:
    from jobs.storage.bucket import Bucket

    Folder: TypeAlias = Path | Bucket
else:
    # `Bucket` is imported only if the lake is in a bucket.
    Folder = Path

# The temporary names of `whole` and `create_whole`. A killed process leaves such a file.
HALF_WRITTEN = re.compile(r"\..+\.[0-9a-f]{32}")
_AT_ONCE = 8
_One = TypeVar("_One")
_Made = TypeVar("_Made")


def folder_at(root: str) -> Folder:
    """Return the folder that a setting names: a path, `file://path`, `s3a://bucket/path` or `s3://bucket/path`."""
    if in_bucket := re.fullmatch(r"s3a?://([^/]+(?:/.*?)?)/*", root):
        from jobs.storage.bucket import Bucket

        bucket, _, key = in_bucket[1].partition("/")
        return Bucket(bucket, key)
    path = re.sub(r"^file:(//)?", "", root)
    if re.match(r"\w+:", path):
        raise Refusal(f"LAKE_ROOT={root!r} is not supported: use a path, file://path or s3a://bucket/path")
    return Path(path).expanduser().resolve()


def for_each(folder: Folder, work: Callable[[_One], _Made], ones: Sequence[_One]) -> list[_Made]:
    """Return the result of the work for each item. In a bucket each item needs requests, so several run at once."""
    if isinstance(folder, Path):
        return [work(one) for one in ones]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(work, ones))


def place(file: Folder, target: Folder, *, keep: bool = False) -> None:
    """Move a whole file to its final place. With ``keep`` the original stays, too; in a bucket it always stays.

    The file's modification time becomes now. A deletion needs the time when a file was placed, which may be hours after
    it was staged.
    """
    if isinstance(file, Path):
        os.utime(file)
        Path(str(target)).hardlink_to(file) if keep else file.rename(str(target))
    else:
        file.copy_to(_in_same_bucket(target))


def make_durable(*paths: Folder) -> None:
    """Make files, and the names in folders, survive a power cut. A bucket does so by itself.

    A file is durable when both its content and its name in the folder are: pass the file and its folder.
    """
    for path in paths:
        if isinstance(path, Path):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            except OSError as error:
                # Some network file systems refuse fsync on a folder: they keep names by themselves.
                if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
                    raise
            finally:
                os.close(descriptor)


def make_folder(folder: Folder) -> None:
    """Make a folder and the folders above it, if they are missing. On a disk their names are durable."""
    if not isinstance(folder, Path) or folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    make_durable(folder.parent)


@contextmanager
def whole(file: Folder, *, durable: bool = True) -> Iterator[Folder]:
    """Yield the path to write a new or changed file to. A reader sees the whole new content, or the earlier content."""
    if not isinstance(file, Path):
        # A bucket shows a file only after its end is written.
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
    """Write a small file on a disk as a whole; return False, and write nothing, if it exists already."""
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
    """A temporary name beside the file, which listings ignore since it begins with a dot."""
    return file.with_name(f".{file.name}.{uuid.uuid4().hex}")


def write_whole(file: Folder, content: bytes, *, durable: bool = True) -> None:
    """Write a small file as a whole."""
    with whole(file, durable=durable) as new:
        new.write_bytes(content)


def remove(folder: Folder) -> None:
    """Remove a folder with its content, as far as possible. Errors are ignored, so callers must not rely on it."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(OSError):
        folder.remove()


def put_aside(file: Path, folder: Path, name: str) -> Path:
    """Move a file on a disk into a folder, and return its new place. Its new ``name`` gets an end of its own."""
    aside = folder / f"{name}-{uuid.uuid4().hex}"
    make_folder(folder)
    file.rename(aside)
    make_durable(file.parent)
    return aside


def delete_files(files: Collection[Folder]) -> None:
    """Delete files of one lake. A file that does not exist is no error."""
    in_bucket = []
    for file in files:
        if isinstance(file, Path):
            file.unlink(missing_ok=True)
        else:
            in_bucket.append(file)
    if in_bucket:
        in_bucket[0].delete_with(in_bucket[1:])


def move(folder: Folder, target: Folder) -> None:
    """Move a folder: at once on a disk. In a bucket all files are copied before the first one is removed."""
    if isinstance(folder, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(str(target))
        return
    for file in folder.written():
        file.copy_to(_in_same_bucket(target / str(file.relative_to(folder))))
    folder.remove()


def written(folder: Folder) -> dict[Folder, float]:
    """The files in a folder, and when each was written, in seconds since 1970."""
    if not isinstance(folder, Path):
        return {file: seen.st_mtime for file, seen in folder.written().items() if file.parent == folder}
    found: dict[Folder, float] = {}
    for file in folder.iterdir() if folder.is_dir() else ():
        # Other processes may remove files here.
        with suppress(FileNotFoundError):
            if file.is_file():
                found[file] = file.stat().st_mtime
    return found


def last_written(folder: Folder) -> float:
    """Return when a folder was last written to, in seconds since 1970; 0 for an empty place in a bucket."""
    if isinstance(folder, Path):
        return folder.stat().st_mtime
    return max((seen.st_mtime for seen in folder.written().values()), default=0.0)


def _in_same_bucket(folder: Folder) -> "Bucket":
    """Return the target of a copy from a bucket: it lies in the same lake, so it is in the same bucket."""
    if isinstance(folder, Path):
        raise TypeError(f"{folder} is not in a bucket")
    return folder
