"""Small JSON documents with atomic create and replace, in a local folder and in an object store alike."""

import json
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from obstore.exceptions import AlreadyExistsError
from obstore.store import LocalStore, ObjectStore, S3Store

from jobs.folders import Folder
from jobs.refusal import Refusal

_PROBE = "probe"
# The folders of which this process knows that their store creates only where there is nothing.
_proven: set[str] = set()


class Documents:
    """The documents of one folder. A reader sees a whole one or none."""

    def __init__(self, store: ObjectStore, name: str = "") -> None:
        """Any store whose `put` can be told to create only; ``name``: that of the folder, if it has one."""
        self._store = store
        self._name = name

    @classmethod
    def at(cls, folder: Folder) -> Self:
        """A folder; it is made if need be."""
        return cls(LocalStore(folder, mkdir=True) if isinstance(folder, Path) else folder.store, str(folder))

    def require_exclusive_create(self) -> None:
        """Refuse a store that overwrites what it is told to create only. Each process asks once, by two requests.

        Leases rest on it, and so do the commits of delta-rs, which asks a store in the same way. The document stays:
        of two creates of one name at least the second must fail, however many processes ask at the same time.
        """
        if self._name in _proven:
            return
        if self.create(_PROBE, {"id": uuid.uuid4().hex}) and self.create(_PROBE, {"id": uuid.uuid4().hex}):
            raise Refusal(
                f"the store of {self._name} overwrites what it is told to create only, so two writers would lose "
                f"each other's rows: set LAKE_ROOT (AWS_ENDPOINT_URL={os.environ.get('AWS_ENDPOINT_URL', '')!r}) to "
                "a store, or a version of it, that supports `If-None-Match: *`"
            )
        if self._name:
            _proven.add(self._name)

    def create(self, name: str, document: dict[str, Any]) -> bool:
        """Write a document that is not there yet; False if it is. Of several writers one creates it."""
        content = json.dumps(document).encode()
        try:
            self._store.put(name, content, mode="create")
        except AlreadyExistsError:
            # A client asks a store again when the answer is lost: what is there may be our own.
            with suppress(FileNotFoundError):
                return isinstance(self._store, S3Store) and self._store.get(name).bytes().to_bytes() == content
            return False
        return True

    def replace(self, name: str, document: dict[str, Any]) -> None:
        """Write a document, whatever was there."""
        self._store.put(name, json.dumps(document).encode())

    def read(self, name: str) -> dict[str, Any] | None:
        """A document; none if it is not there, or if a power cut left its name without its content."""
        try:
            document = json.loads(self._store.get(name).bytes().to_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return document if isinstance(document, dict) else None

    def exists(self, name: str) -> bool:
        """Whether there is such a document."""
        try:
            self._store.head(name)
        except FileNotFoundError:
            return False
        return True

    def names(self) -> list[str]:
        """The names of all documents, in order."""
        return sorted(entry["path"] for entry in self._store.list().collect())

    def delete(self, name: str) -> None:
        """Remove a document; nothing happens if it is not there."""
        with suppress(FileNotFoundError):
            self._store.delete(name)
