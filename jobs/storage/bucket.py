"""A file or folder in a bucket of an object store that speaks S3, with the methods of `pathlib` that the lake needs.

Where the store is, and who asks, its clients take from the environment: `AWS_ENDPOINT_URL`, `AWS_REGION`, credentials.
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
    """What is known of a file without reading it, by the names that `os.stat` gives them."""

    st_size: int
    st_mtime: float


@dataclass(frozen=True, order=True)
class Bucket:
    """A place in a bucket. There are no folders: one is there as long as something lies below its name."""

    bucket: str
    key: str = ""

    def __str__(self) -> str:
        """By the name under which all clients know it."""
        return f"s3://{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> Self:
        """What lies below."""
        return type(self)(self.bucket, f"{self.key}/{name}".strip("/"))

    @property
    def store(self) -> S3Store:
        """What lies below, by the library that can create a file only where there is none."""
        return _store(self.bucket, self.key or None)

    @property
    def name(self) -> str:
        """The last part of its name."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The folder in which it lies."""
        return type(self)(self.bucket, self.key.rpartition("/")[0])

    def relative_to(self, folder: Self) -> PurePosixPath:
        """How it is called below a folder."""
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
        """How large it is, and since when."""
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
        """The files in it of this name; a `*` may stand for folders, too."""
        depth = pattern.count("/")
        for file in self.written():
            below = str(file.relative_to(self))
            parts = zip(below.split("/"), pattern.split("/"), strict=False)
            if below.count("/") == depth and all(fnmatchcase(part, wanted) for part, wanted in parts):
                yield file

    def rglob(self, pattern: str) -> Iterator[Self]:
        """The files of this name in it and below it."""
        return (file for file in self.written() if fnmatchcase(file.name, pattern))

    def read_bytes(self) -> bytes:
        """What is in it."""
        return _store(self.bucket).get(self.key).bytes().to_bytes()

    def read_text(self, encoding: str = "utf-8") -> str:
        """What is in it."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes) -> None:
        """Write it, whatever was there; a reader sees a whole file or none."""
        _store(self.bucket).put(self.key, content)

    def copy_to(self, target: Self) -> None:
        """Within its bucket, and without reading it here."""
        _store(self.bucket).copy(self.key, target.key)

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a folder comes with what is put into it."""

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove a file; a store does not say whether it was there."""
        _store(self.bucket).delete(self.key)

    def delete_with(self, others: Iterable[Self]) -> None:
        """Delete this file and others of its bucket, a thousand with one request."""
        _store(self.bucket).delete([self.key, *(other.key for other in others)])

    def remove(self) -> None:
        """Remove all that lies below it, Hadoop's marks of folders included."""
        with suppress(FileNotFoundError):
            arrow_files().delete_dir(self._name)

    @property
    def _name(self) -> str:
        """As Arrow calls it."""
        return f"{self.bucket}/{self.key}".rstrip("/")

    def _listed(self, *, recursive: bool) -> dict[Self, FileInfo]:
        """By Arrow, which can tell a mark of Hadoop's from a file without content."""
        below = FileSelector(self._name, allow_not_found=True, recursive=recursive)
        found = sorted(arrow_files().get_file_info(below), key=lambda info: str(info.path))
        return {type(self)(self.bucket, info.path.partition("/")[2]): info for info in found}


def reason_of(error: Exception) -> str | None:
    """Why a store was of no use, in few words: it is not reached, refuses, has no such bucket. None: it is not that."""
    # Arrow and delta-rs have no type of their own for it; what a disk says has a number.
    if not isinstance(error, BaseError | OSError) or getattr(error, "errno", None) is not None:
        return None
    text = str(error).partition("Debug source:")[0].strip()
    if said := re.search(r"<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", text):
        return f"{said[2]} ({said[1]})"
    # What is closest to the cause comes last.
    return " ".join(text.splitlines()[-1].split()[-_REASON_WORDS:]) if text else type(error).__name__


def cannot_be_used(root: object, reason: str) -> str:
    """A sentence about a lake whose store was of no use."""
    return (
        f"the lake at {root} cannot be used: {reason}; is the bucket there, and are AWS_ENDPOINT_URL, AWS_REGION "
        "and the keys right? docs/clusters.md tells what is needed"
    )


def arrow_files() -> S3FileSystem:
    """What Arrow reads and writes buckets by."""
    return _arrow_files(os.environ.get("AWS_ENDPOINT_URL"), os.environ.get("AWS_REGION"))


# Each of these has connections of its own.
@lru_cache(maxsize=4)
def _arrow_files(endpoint: str | None, region: str | None) -> S3FileSystem:
    return S3FileSystem(endpoint_override=endpoint, region=region)


@lru_cache(maxsize=64)
def _store(bucket: str, prefix: str | None = None) -> S3Store:
    return S3Store(bucket, prefix=prefix)
