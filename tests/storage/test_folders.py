"""A folder on a disk and a folder in a bucket give the same answers."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import httpx
import pyarrow as pa
import pytest

from jobs.control.checkpoint import Checkpoint
from jobs.finality.run import folder as runs
from jobs.finality.run.folder import RunFolder
from jobs.lake.delta.fenced import FencedTable, OvertakenError, opened
from jobs.lake.delta.reading import files_of
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines import PIPELINES
from jobs.refusal import Refusal
from jobs.settings import PROJECT, KeptDays
from jobs.storage import parquet
from jobs.storage.bucket import Bucket
from jobs.storage.documents import Documents
from jobs.storage.folders import Folder, folder_at, last_written, move, place, remove, write_whole, written
from jobs.upkeep import old_files as upkeep
from jobs.upkeep.old_files import look_after
from local.platform.ports import free_port
from tests.storage.object_store import losing_answers, serving

SUM = PIPELINES["rolling_sum"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with serving(tmp_path_factory.mktemp("s3") / "server.log") as env:
        yield env


@pytest.fixture(params=["disk", "bucket"])
def folder(
    request: pytest.FixtureRequest, store: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Folder:
    if request.param == "disk":
        return tmp_path / "folder"
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    return folder_at(store["LAKE_ROOT"]) / tmp_path.name / "folder"


@pytest.fixture
def full(folder: Folder) -> Folder:
    """Two files, one of them empty, and a third in a subfolder."""
    for name, content in (("a.json", b"a.json"), ("b.txt", b""), ("in/c.json", b"in/c.json")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, content)
    return folder


def names(folder: Folder) -> list[str]:
    return sorted(str(file).removeprefix(f"{folder}/") for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("root", "name"),
    [
        ("s3a://lakes", "s3://lakes"),
        ("s3a://lakes/", "s3://lakes"),
        ("s3://lakes/a/b//", "s3://lakes/a/b"),
        ("file:///lake", "/lake"),
        ("/lake", "/lake"),
    ],
)
def test_a_setting_names_a_folder(root: str, name: str) -> None:
    assert str(folder_at(root)) == name


@pytest.mark.parametrize("root", ["s3a://", "s3:///a", "gs://lakes/a", "hdfs://host/a"])
def test_what_cannot_hold_a_lake_is_refused(root: str) -> None:
    with pytest.raises(Refusal, match="is not supported: use a path, file://path or s3a://bucket/path"):
        folder_at(root)


def test_names_and_parents(folder: Folder) -> None:
    file = folder / "in" / "c.json"
    assert (file.name, file.parent.name, file.parent.parent) == ("c.json", "in", folder)
    assert file == folder / "in/c.json"
    assert len({file, folder / "in/c.json"}) == 1


def test_what_is_there_is_found(full: Folder) -> None:
    assert sorted(entry.name for entry in full.iterdir()) == ["a.json", "b.txt", "in"]
    assert [file.name for file in full.glob("*.json")] == ["a.json"]
    assert [file.name for file in full.glob("*/c.json")] == ["c.json"]
    assert sorted(file.name for file in full.rglob("*.json")) == ["a.json", "c.json"]
    assert names(full) == ["a.json", "b.txt", "in/c.json"]
    assert (full.exists(), full.is_dir(), full.is_file()) == (True, True, False)
    file = full / "a.json"
    assert (file.exists(), file.is_dir(), file.is_file()) == (True, False, True)
    assert (file.stat().st_size, file.read_bytes(), file.read_text()) == (6, b"a.json", "a.json")
    assert written(full).keys() == {full / "a.json", full / "b.txt"}
    assert written(full)[file] == pytest.approx(file.stat().st_mtime, abs=1)
    assert last_written(full) >= file.stat().st_mtime - 1


def test_what_is_not_there_is_not_found(folder: Folder) -> None:
    nothing = folder / "nothing"
    assert (nothing.exists(), nothing.is_dir(), nothing.is_file()) == (False, False, False)
    assert (list(nothing.glob("*")), list(nothing.rglob("*")), written(nothing)) == ([], [], {})
    for ask in (nothing.read_bytes, nothing.read_text, nothing.stat):
        with pytest.raises(FileNotFoundError):
            ask()
    nothing.unlink(missing_ok=True)
    remove(nothing)


def test_a_file_of_a_longer_name_is_another(full: Folder) -> None:
    write_whole(full / "in-between", b"x")
    assert [file.name for file in (full / "in").rglob("*")] == ["c.json"]
    remove(full / "in")
    assert names(full) == ["a.json", "b.txt", "in-between"]


def test_a_file_is_written_anew_as_a_whole(full: Folder) -> None:
    write_whole(full / "a.json", b"new")
    assert (full / "a.json").read_bytes() == b"new"
    assert names(full) == ["a.json", "b.txt", "in/c.json"], "nothing is left of how it was written"


@pytest.mark.parametrize("keep", [False, True])
def test_a_file_is_placed(full: Folder, keep: bool) -> None:
    place(full / "a.json", full / "in" / "placed.json", keep=keep)
    assert (full / "in" / "placed.json").read_bytes() == b"a.json"
    # In a bucket the file is deleted with its stage.
    assert (full / "a.json").exists() is (keep or not isinstance(full, Path))


def test_on_a_disk_nothing_is_copied(tmp_path: Path) -> None:
    write_whole(tmp_path / "staged", b"rows")
    place(tmp_path / "staged", tmp_path / "kept", keep=True)
    assert (tmp_path / "kept").samefile(tmp_path / "staged")


def test_a_file_is_removed(full: Folder) -> None:
    (full / "a.json").unlink()
    assert names(full) == ["b.txt", "in/c.json"]


def test_a_folder_is_moved_with_all_that_is_in_it(full: Folder) -> None:
    target = full.parent / "aside" / "folder-1"
    move(full, target)
    assert names(target) == ["a.json", "b.txt", "in/c.json"]
    assert not full.exists()


def test_a_folder_is_removed_with_all_that_is_in_it(full: Folder) -> None:
    remove(full)
    assert not full.exists()


def test_parquet_files_are_read_and_written(folder: Folder) -> None:
    file = folder / "day=1" / "rows.parquet"
    parquet.write(pa.table({"a": [1, 2], "b": ["x", "y"]}), file)
    assert parquet.read(file, ["a"]).to_pydict() == {"a": [1, 2]}
    assert parquet.footer(file).num_rows == 2
    assert parquet.files_in(folder) == [file]


def test_of_several_writers_one_creates_a_document(folder: Folder) -> None:
    documents, others = Documents.at(folder), Documents.at(folder)
    assert [documents.create("lease-1", {"by": 1}), others.create("lease-1", {"by": 2})] == [True, False]
    documents.replace("beat", {"n": 1})
    others.replace("beat", {"n": 2})
    assert (documents.read("lease-1"), documents.read("beat"), documents.read("none")) == ({"by": 1}, {"n": 2}, None)
    assert (documents.names(), documents.exists("beat"), documents.exists("none")) == (["beat", "lease-1"], True, False)
    documents.delete("beat")
    documents.delete("beat")
    assert documents.names() == ["lease-1"]


def _table(path: Folder, properties: Mapping[str, str] = MappingProxyType({})) -> FencedTable:
    schema = pa.schema({"day": pa.string(), "a": pa.int64()})
    return FencedTable(path, opened(path, schema, "day", properties))


def _commit(table: FencedTable, a: int) -> None:
    with table.staged() as stage:
        parquet.write(pa.table({"a": [a]}), stage / "day=1" / "rows.parquet")
        table.transact([table.place(file) for file in parquet.files_in(stage)], "{}")


def test_a_writer_that_was_overtaken_commits_nothing(folder: Folder) -> None:
    first, second = _table(folder), _table(folder)
    _commit(first, 1)
    with pytest.raises(OvertakenError):
        _commit(second, 2)
    _commit(first, 3)
    assert sorted(files_of(opened_again(folder), folder).to_table()["a"].to_pylist()) == [1, 3]


def opened_again(path: Folder):
    return opened(path, pa.schema([]), "day", {})


def test_small_files_are_merged_and_old_ones_deleted(folder: Folder) -> None:
    table = _table(folder)
    for a in range(5):
        _commit(table, a)
    table.merge_small_files("{}")
    assert sorted(files_of(opened_again(folder), folder).to_table()["a"].to_pylist()) == [0, 1, 2, 3, 4]
    assert len(opened_again(folder).file_uris()) == 1


def test_nothing_is_written_above_a_table(folder: Folder) -> None:
    """Some users may write only below a path, but Arrow would create a marker for every folder above the file."""
    table = _table(folder)
    for a in range(2):
        _commit(table, a)
    table.merge_small_files("{}")
    if isinstance(folder, Path):
        return
    listed = httpx.get(f"{os.environ['AWS_ENDPOINT_URL']}/{folder.bucket}", params={"list-type": 2}, trust_env=False)
    keys = re.findall("<Key>(.*?)</Key>", listed.text)
    assert f"{folder.key}/_delta_log/00000000000000000003.json" in keys
    assert [key for key in keys if key.endswith("/") and folder.key.startswith(key)] == []


def _let_its_clock_go_on(folder: Folder) -> None:
    """A store gives times in whole seconds: wait until a new file is younger than all others."""
    last = max(file.stat().st_mtime for file in folder.rglob("*"))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        write_whole(folder / "_now", b"")
        if (folder / "_now").stat().st_mtime > last:
            return
    raise AssertionError("the clock stands still")


def test_what_no_reader_needs_is_deleted(folder: Folder) -> None:
    table = _table(folder, {"delta.deletedFileRetentionDuration": "interval 0 hours"})
    for a in range(3):
        _commit(table, a)
    _let_its_clock_go_on(folder)
    table.merge_small_files("{}")
    sizes = [file.stat().st_size for file in parquet.files_in(folder)]
    freed = table.delete_what_no_reader_needs()
    (left,) = parquet.files_in(folder)
    assert (freed.files, freed.bytes, freed.left) == (3, sum(sizes) - left.stat().st_size, 0)
    assert sorted(files_of(opened_again(folder), folder).to_table()["a"].to_pylist()) == [0, 1, 2]


def test_a_bucket_that_is_not_there_is_a_sentence(store: dict[str, str]) -> None:
    env = {**os.environ, **store, "LAKE_ROOT": "s3a://no-such-bucket/tideline"}
    for words in (["query", "select * from rolling_sum"], ["streams", "status"]):
        command = [sys.executable, "-m", "jobs", *words]
        done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 1
        said = "cannot be used: The specified bucket does not exist (NoSuchBucket); check that the bucket exists, and"
        assert f"\ntideline: the lake at s3a://no-such-bucket/tideline {said}" in f"\n{done.stderr}"
        assert "Traceback" not in done.stderr


def test_a_store_that_does_not_answer_a_job_is_no_refusal(store: dict[str, str]) -> None:
    """A task with a refused job is not tried again, so this error must not be a refusal."""
    env = {**os.environ, **store, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}
    command = [sys.executable, "-m", "jobs", "recompute", "rolling_sum", "--run", "a run"]
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "Connection refused" in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.startswith("tideline: ")]


def test_a_store_that_does_not_answer_is_no_damage(
    store: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way out of damage is to begin anew, which would clear the rows that are served."""
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    checkpoint = Checkpoint(folder_at(store["LAKE_ROOT"]) / tmp_path.name)
    write_whole(checkpoint.path / "metadata", b'{"id":"6d7e0c06-3d1c-4f39-a1a4-2b1f6bbd4f25"}')
    assert checkpoint.query_id() == "6d7e0c06-3d1c-4f39-a1a4-2b1f6bbd4f25"
    monkeypatch.setattr(Bucket, "read_bytes", _no_network)
    with pytest.raises(OSError, match="AWS Error NETWORK_CONNECTION"):
        checkpoint.query_id()


def _no_network(_: Bucket) -> bytes:
    raise OSError("AWS Error NETWORK_CONNECTION")


def test_an_answer_that_is_lost_is_not_taken_for_another_writer(
    store: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sends its request again, and finds the object that it created itself."""
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    with losing_answers(store["AWS_ENDPOINT_URL"]) as url:
        script = [sys.executable, "-c", _STUBBORN, f"{store['LAKE_ROOT']}/{tmp_path.name}", url]
        done = subprocess.run(script, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["True", "False", "1", "1"], done.stderr


_STUBBORN = """
import os, sys
from jobs.storage import bucket
from tests.storage.test_folders import Documents, _commit, _table, folder_at

# Arrow creates nothing that must not be there: it stays with the server itself.
directly = bucket.arrow_files()
bucket.arrow_files = lambda: directly
os.environ["AWS_ENDPOINT_URL"] = sys.argv[2]
folder = folder_at(sys.argv[1])
documents = Documents.at(folder / "control")
print(documents.create("lease-1", {"by": 1}), documents.create("lease-1", {"by": 2}))
table = _table(folder / "table")
for number in (1, 2):
    before = table.version
    _commit(table, number)
    print(table.version - before)
"""


def test_a_lake_is_looked_after(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    old = ("checkpoints/_aside/ingest-numbers-1/offsets/7", "quality/check_gone/r-1.html")
    run = RunFolder.of(PipelineLake(folder, SUM), "r").path
    for name in (*old, "live/rolling_sum/slice=a/a.parquet"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, b"ten bytes.")
    for name in ("ended.json", "windows-1/slice=a/a.parquet"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(run / name, b"{}")
    assert not any(removed.files for removed in look_after(folder, KeptDays()))
    later = SimpleNamespace(time=lambda: time.time() + 31 * 24 * 3600)
    for module in (upkeep, runs):
        monkeypatch.setattr(module, "time", later)
    found = {removed.what: (removed.files, removed.bytes) for removed in look_after(folder, KeptDays())}
    assert {what: counted for what, counted in found.items() if counted[0]} == {
        "files that were put aside": (1, 10),
        "pages about audits and checks": (1, 10),
        "run folders": (2, 4),
    }
    assert [name for name in names(folder) if not name.startswith("control/")] == ["live/rolling_sum/slice=a/a.parquet"]
    assert not any(removed.files for removed in look_after(folder, KeptDays()))
