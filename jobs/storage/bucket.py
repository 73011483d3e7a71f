"""A file or folder in a bucket of an S3 object store, with those methods of `pathlib.Path` that the lake needs.

A lake on a disk uses `Path` itself. So a method here means the same as the method of `Path` with that name.
`folders.py` has the operations that differ.

The clients read the address of the store and the keys from the environment: `AWS_ENDPOINT_URL`, `AWS_REGION`,
credentials.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import PurePosixPath
from typing import NamedTuple, Self

from obstore.exceptions import BaseError
from obstore.store import S3Store
from pyarrow.fs import FileInfo, FileSelector, FileType, S3FileSystem

_REASON_WORDS = 30


class Written(NamedTuple):
    """The size and time of a file, found without reading it; the names are those of `os.stat`."""

    st_size: int
    st_mtime: float


@dataclass(frozen=True, order=True)
class Bucket:
    """A file or folder in a bucket. A bucket has only files: a folder exists as long as a file lies below its name."""

    bucket: str
    key: str = ""

    def __str__(self) -> str:
        """Return its URL, which all clients understand."""
        return f"s3://{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> Self:
        """Return the file or folder of this name below it."""
        return type(self)(self.bucket, f"{self.key}/{name}".strip("/"))

    @property
    def store(self) -> S3Store:
        """The same place for `obstore`, the library that can create a file and refuse to overwrite one."""
        return _store(self.bucket, self.key or None)

    @property
    def name(self) -> str:
        """The last part of its name."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The folder above it."""
        return type(self)(self.bucket, self.key.rpartition("/")[0])

    def relative_to(self, folder: Self) -> PurePosixPath:
        """Return its path relative to a folder."""
        return PurePosixPath(f"{self.bucket}/{self.key}").relative_to(f"{folder.bucket}/{folder.key}")

    def exists(self) -> bool:
        """Whether it is a file, or a folder with something in it."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Whether it is a file."""
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Whether something lies below it, or Hadoop has marked it as a folder."""
        (found,) = arrow_files().get_file_info([self._name])
        return found.type is FileType.Directory

    def stat(self) -> Written:
        """Return its size and when it was last written."""
        meta = _store(self.bucket).head(self.key)
        return Written(meta["size"], meta["last_modified"].timestamp())

    def written(self) -> dict[Self, Written]:
        """All files below it."""
        found = self._listed(recursive=True).items()
        return {file: Written(info.size, info.mtime_ns / 1e9) for file, info in found if info.type is FileType.File}

    def iterdir(self) -> Iterator[Self]:
        """The files and folders in it."""
        return iter(self._listed(recursive=False))

    def glob(self, pattern: str) -> Iterator[Self]:
        """The files with a path that matches part by part: `*/*.json` finds `a/b.json`, but not `b.json`."""
        depth = pattern.count("/")
        for file in self.written():
            below = str(file.relative_to(self))
            parts = zip(below.split("/"), pattern.split("/"), strict=False)
            if below.count("/") == depth and all(fnmatchcase(part, wanted) for part, wanted in parts):
                yield file

    def rglob(self, pattern: str) -> Iterator[Self]:
        """The files at any depth below it with a name that matches."""
        return (file for file in self.written() if fnmatchcase(file.name, pattern))

    def read_bytes(self) -> bytes:
        """Return its content."""
        return _store(self.bucket).get(self.key).bytes().to_bytes()

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return its content as text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes) -> None:
        """Write the file, or overwrite it. A reader sees a whole file or none."""
        _store(self.bucket).put(self.key, content)

    def copy_to(self, target: Self) -> None:
        """Copy it within its bucket. The store copies, so the content does not pass through this process."""
        _store(self.bucket).copy(self.key, target.key)

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: in a bucket a folder exists as soon as a file lies in it."""

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove a file. A store does not report whether the file was there."""
        _store(self.bucket).delete(self.key)

    def delete_with(self, others: Iterable[Self]) -> None:
        """Delete this file and others of its bucket, up to a thousand in one request."""
        _store(self.bucket).delete([self.key, *(other.key for other in others)])

    def remove(self) -> None:
        """Remove everything below it, with Hadoop's markers of folders."""
        with suppress(FileNotFoundError):
            arrow_files().delete_dir(self._name)

    @property
    def _name(self) -> str:
        """Its path for Arrow."""
        return f"{self.bucket}/{self.key}".rstrip("/")

    def _listed(self, *, recursive: bool) -> dict[Self, FileInfo]:
        """List by Arrow, which distinguishes Hadoop's markers of folders from empty files."""
        below = FileSelector(self._name, allow_not_found=True, recursive=recursive)
        found = sorted(arrow_files().get_file_info(below), key=lambda info: str(info.path))
        return {type(self)(self.bucket, info.path.partition("/")[2]): info for info in found}


def reason_of(error: Exception) -> str | None:
    """Return in few words why a store failed, such as "no such bucket"; None if the error is not from a store."""
    # If a store fails, Arrow and delta-rs raise a plain OSError. Unlike an error of a disk, it has no errno.
    if not isinstance(error, BaseError | OSError) or getattr(error, "errno", None) is not None:
        return None
    text = str(error).partition("Debug source:")[0].strip()
    if found := re.search(r"<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", text):
        return f"{found[2]} ({found[1]})"
    # The words closest to the cause come last.
    return " ".join(text.splitlines()[-1].split()[-_REASON_WORDS:]) if text else type(error).__name__


def cannot_be_used(root: object, reason: str) -> str:
    """Return a message to the operator: the lake's store failed, for this reason."""
    return (
        f"the lake at {root} cannot be used: {reason}; check that the bucket exists, and that AWS_ENDPOINT_URL, "
        "AWS_REGION and the keys are right, as docs/clusters.md describes"
    )


def arrow_files() -> S3FileSystem:
    """Arrow's file system for buckets."""
    return _arrow_files(os.environ.get("AWS_ENDPOINT_URL"), os.environ.get("AWS_REGION"))


# Each file system has its own connections, so it is shared.
@lru_cache(maxsize=4)
def _arrow_files(endpoint: str | None, region: str | None) -> S3FileSystem:
    return S3FileSystem(endpoint_override=endpoint, region=region)


@lru_cache(maxsize=64)
def _store(bucket: str, prefix: str | None = None) -> S3Store:
    return S3Store(bucket, prefix=prefix)
