"""Small JSON documents with atomic create and replace, in a local folder and in an object store alike."""

import json
import logging
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from zlib import crc32

from obstore.exceptions import AlreadyExistsError
from obstore.store import ObjectStore, S3Store

from jobs.refusal import Refusal
from jobs.storage.folders import Folder, create_whole, make_folder, write_whole

log = logging.getLogger(__name__)

# The folder for copies of unreadable documents, below the folder of the documents.
UNREADABLE = "_unreadable"
# A function that is called once for each unreadable document, with its file.
Report = Callable[[Path], None]
_PROBE = "probe"
# The folders that passed `require_exclusive_create` in this process.
_proven: set[str] = set()


class Documents:
    """The documents of one folder. A reader sees a whole document or none.

    On a disk a document is durable before another process can see it, unless it is written with ``durable=False``.
    """

    def __init__(self, place: Path | ObjectStore, name: str = "", report: Report | None = None) -> None:
        """Use a folder, or a store with a `put` that can create without overwriting; ``name`` is for messages."""
        self._place = place
        self._name = name
        self._report = report

    @classmethod
    def at(cls, folder: Folder, report: Report | None = None) -> Self:
        """Return the documents of a folder, which the first write creates."""
        return cls(folder if isinstance(folder, Path) else folder.store, str(folder), report)

    def require_exclusive_create(self) -> None:
        """Refuse a store that overwrites a document when it is asked only to create one.

        Leases and the commits of delta-rs rely on such a create. A process tests each folder once, by two creates of
        one name: at least the second must fail. The document stays. So the test also works when many processes run it
        at the same time.
        """
        if self._name in _proven:
            return
        if self.create(_PROBE, {"id": uuid.uuid4().hex}) and self.create(_PROBE, {"id": uuid.uuid4().hex}):
            raise Refusal(
                f"the store of {self._name} does not support `If-None-Match: *`: it overwrites a file that must only "
                "be created, so of two writers one would lose its rows. Use a store that does, or a newer version: "
                f"set LAKE_ROOT and AWS_ENDPOINT_URL={os.environ.get('AWS_ENDPOINT_URL', '')!r}"
            )
        if self._name:
            _proven.add(self._name)

    def create(self, name: str, document: dict[str, Any]) -> bool:
        """Create a document; return False if it exists already. Of several writers exactly one gets True."""
        content = json.dumps(document).encode()
        if isinstance(self._place, Path):
            return create_whole(self._made(self._place) / name, content)
        try:
            self._place.put(name, content, mode="create")
        except AlreadyExistsError:
            # A client repeats a request whose answer was lost. So this call may have written the document itself.
            with suppress(FileNotFoundError):
                return isinstance(self._place, S3Store) and self._place.get(name).bytes().to_bytes() == content
            return False
        return True

    def replace(self, name: str, document: dict[str, Any], *, durable: bool = True) -> None:
        """Write a document, or overwrite it. A power cut may lose a document that is not ``durable``."""
        content = json.dumps(document).encode()
        if isinstance(self._place, Path):
            write_whole(self._made(self._place) / name, content, durable=durable)
        else:
            self._place.put(name, content)

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a document; None if it is missing or unreadable. On a disk, a copy of an unreadable one is kept."""
        try:
            content = self._content(name)
        except FileNotFoundError:
            return None
        with suppress(ValueError):
            document = json.loads(content)
            if isinstance(document, dict):
                return document
        if isinstance(self._place, Path):
            keep_copy(self._place / name, self._report)
        return None

    def exists(self, name: str) -> bool:
        """Whether there is such a document."""
        if isinstance(self._place, Path):
            return (self._place / name).is_file()
        try:
            self._place.head(name)
        except FileNotFoundError:
            return False
        return True

    def names(self) -> list[str]:
        """The names of all documents, in order."""
        if isinstance(self._place, Path):
            try:
                return sorted(file.name for file in self._place.iterdir() if _is_document(file.name))
            except FileNotFoundError:
                return []
        return sorted(entry["path"] for entry in self._place.list().collect())

    def delete(self, name: str) -> None:
        """Remove a document; nothing happens if it is not there."""
        with suppress(FileNotFoundError):
            if isinstance(self._place, Path):
                (self._place / name).unlink()
            else:
                self._place.delete(name)

    def _content(self, name: str) -> bytes:
        if isinstance(self._place, Path):
            return (self._place / name).read_bytes()
        return self._place.get(name).bytes().to_bytes()

    @staticmethod
    def _made(folder: Path) -> Path:
        make_folder(folder)
        return folder


def keep_copy(file: Path, report: Report | None) -> None:
    """Keep a copy of a file that cannot be read, and report it once. A power cut leaves such files."""
    with suppress(OSError):
        content = file.read_bytes()
        copy = file.parent / UNREADABLE / f"{file.name}-{crc32(content):08x}"
        if copy.is_file():
            return
        copy.parent.mkdir(exist_ok=True)
        if create_whole(copy, content):
            log.warning("%s cannot be read, and counts as missing; a copy is kept in %s", file, copy.parent)
            if report:
                report(file)


def _is_document(name: str) -> bool:
    """Whether a file is a document. Killed writers leave files with names that begin with a dot or contain a `#`."""
    return not name.startswith((".", "_")) and "#" not in name
