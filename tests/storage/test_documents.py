"""Documents are whole or not there, and only one of several writers creates one, in a folder and in an object store."""

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore, ObjectStore

from jobs.storage.documents import UNREADABLE, Documents
from tests import processes

NAME = "lease-0000000001"
STORES: dict[str, Callable[[Path], Path | ObjectStore]] = {
    "folder": lambda path: path,
    "object store": lambda path: MemoryStore(),
}


@pytest.fixture(params=STORES)
def documents(request: pytest.FixtureRequest, tmp_path: Path) -> Documents:
    return Documents(STORES[request.param](tmp_path / "control" / "job"))


def test_nothing_is_there_at_first(documents: Documents) -> None:
    assert documents.names() == []
    assert documents.read(NAME) is None
    assert not documents.exists(NAME)
    documents.delete(NAME)


def test_a_document_is_created_once_and_the_first_word_stands(documents: Documents) -> None:
    assert documents.create(NAME, {"by": "first"})
    assert not documents.create(NAME, {"by": "second"})
    assert documents.read(NAME) == {"by": "first"}
    assert documents.exists(NAME)


def test_what_is_replaced_is_gone_and_what_is_deleted_can_be_created_again(documents: Documents) -> None:
    documents.replace(NAME, {"by": "first", "more": [1]})
    documents.replace(NAME, {"by": "second"})
    assert documents.read(NAME) == {"by": "second"}
    assert not documents.create(NAME, {"by": "third"})
    documents.delete(NAME)
    assert documents.names() == []
    assert documents.create(NAME, {"by": "third"})


def test_names_are_in_order(documents: Documents) -> None:
    names = [f"{kind}-{number:010d}" for kind in ("stop", "lease") for number in (11, 2, 1)]
    for name in names:
        documents.replace(name, {})
    assert documents.names() == sorted(names)


def test_a_document_without_keys_is_no_missing_one(documents: Documents) -> None:
    documents.create(NAME, {})
    assert documents.read(NAME) == {}


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=5,
        ),
        max_size=5,
    )
)
def test_what_is_written_is_read(document: dict[str, Any]) -> None:
    documents = Documents(MemoryStore())
    documents.replace(NAME, document)
    assert documents.read(NAME) == document


def test_the_folder_is_made_and_holds_one_file_per_document(tmp_path: Path) -> None:
    documents = Documents.at(tmp_path / "control" / "job")
    documents.replace(NAME, {"text": "sea"})
    documents.replace(NAME, {"text": "the sea"})
    (file,) = (tmp_path / "control" / "job").iterdir()
    assert file.name == NAME
    assert json.loads(file.read_text()) == {"text": "the sea"}


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b'{"time": 12', b"\xff\xfe"], ids=repr)
def test_what_a_power_cut_left_is_no_document_and_takes_its_name(content: bytes, tmp_path: Path) -> None:
    told = list[Path]()
    documents = Documents.at(tmp_path, report=told.append)
    (tmp_path / NAME).write_bytes(content)
    assert [documents.read(NAME) for _ in range(3)] == [None] * 3
    assert told == [tmp_path / NAME], "people are told once"
    (copy,) = (tmp_path / UNREADABLE).iterdir()
    assert copy.read_bytes() == content
    assert documents.names() == [NAME]
    assert not documents.create(NAME, {})
    documents.replace(NAME, {"time": 12})
    assert documents.read(NAME) == {"time": 12}


def test_what_a_killed_writer_left_is_no_document(tmp_path: Path) -> None:
    """A document is first written under another name. A writer that is killed in between leaves only that file."""
    documents = Documents.at(tmp_path)
    # The second name is the one that earlier versions used.
    for left in (f".{NAME}.5f3a", f"{NAME}#1"):
        (tmp_path / left).write_text('{"half": ')
    assert documents.names() == []
    assert documents.create(NAME, {"whole": True})
    assert documents.names() == [NAME]
    assert documents.read(NAME) == {"whole": True}


_FULL = """
import resource, sys
from pathlib import Path
from jobs.storage.documents import Documents
documents = Documents.at(Path(sys.argv[1]))
documents.create("old", {"text": "kept"})
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for write in (documents.create, documents.replace):
    for name in ("old", "new"):
        try:
            write(name, {"text": "x" * 100_000})
        except Exception as error:
            print(type(error).__name__, flush=True)
"""


def test_what_could_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    """A process that may write only some bytes stands for a full disk."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", _FULL, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4, done.stdout + done.stderr
    documents = Documents.at(tmp_path)
    assert documents.names() == ["old"]
    assert documents.read("old") == {"text": "kept"}
    assert [file.name for file in tmp_path.iterdir()] == ["old"]


def test_a_reader_that_never_rests_sees_only_whole_documents(documents: Documents) -> None:
    texts = [letter * 100_000 for letter in "ab"]
    documents.replace(NAME, {"text": texts[0]})
    with busy([lambda text=text: documents.replace(NAME, {"text": text}) for text in texts]):
        seen = [documents.read(NAME) for _ in range(300)]
        names = [documents.names() for _ in range(300)]
    assert all(document is not None and document["text"] in texts for document in seen)
    assert all(found == [NAME] for found in names)


def test_documents_that_come_and_go_trouble_nobody(documents: Documents) -> None:
    """Two threads prune the same names and one writes them, while the test reads."""
    names = [f"lease-{number:010d}" for number in range(20)]

    def write() -> None:
        for name in names:
            documents.replace(name, {"name": name})

    def prune() -> None:
        for name in names:
            documents.delete(name)

    with busy([write, prune, prune]):
        for _ in range(100):
            assert set(documents.names()) <= set(names)
            for name in names:
                assert documents.read(name) in (None, {"name": name})
                documents.exists(name)


@contextmanager
def busy(actions: list[Callable[[], Any]]) -> Iterator[None]:
    """Run threads that repeat their action; they must not fail."""
    done, errors = threading.Event(), []

    def repeat(action: Callable[[], Any]) -> None:
        try:
            while not done.is_set():
                action()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    assert errors == []


ROUNDS, RACERS = 200, 3


def race(root: str, start: Barrier, results: "Queue[tuple[int, int, bool]]") -> None:
    """Create each round's document at the same moment as the others."""
    documents = Documents.at(Path(root))
    racer = start.wait(60)
    for number in range(ROUNDS):
        start.wait(60)
        results.put((number, racer, documents.create(f"lease-{number:010d}", {"racer": racer})))


def test_of_processes_that_create_together_one_does(tmp_path: Path) -> None:
    found = processes.race(race, tmp_path, racers=RACERS, answers=ROUNDS * RACERS)
    documents = Documents.at(tmp_path)
    for number in range(ROUNDS):
        (winner,) = [racer for at, racer, created in found if at == number and created]
        assert documents.read(f"lease-{number:010d}") == {"racer": winner}
