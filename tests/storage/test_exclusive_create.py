"""Leases and commits need "create only if absent": a store that does not support it is refused before it is used."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jobs.control import writing as writing_module
from jobs.control.epochs import Owner
from jobs.control.folder import Control
from jobs.lake.delta.reading import files_of
from jobs.refusal import Refusal
from jobs.settings import PROJECT, Settings
from jobs.storage.documents import Documents
from jobs.storage.folders import Folder, folder_at
from local.platform import doctor
from local.platform.settings import StackSettings
from tests.storage.object_store import serving
from tests.storage.test_folders import _commit, _table, opened_again

REFUSED = r"If-None-Match.*overwrites a file that must only be created.*LAKE_ROOT.*AWS_ENDPOINT_URL"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with serving(tmp_path_factory.mktemp("s3") / "server.log") as env:
        yield env


@pytest.fixture(scope="module")
def careless_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with serving(tmp_path_factory.mktemp("s3") / "server.log", careless=True) as env:
        yield env


@pytest.fixture
def careless(careless_store: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a lake in a store that ignores `If-None-Match`."""
    for name, value in careless_store.items():
        monkeypatch.setenv(name, value)
    return careless_store


def test_such_a_store_grants_a_lease_twice_and_loses_a_commit(careless: dict[str, str]) -> None:
    """This holds for both clients: they ask in the same way, so a check of the first is valid for the second."""
    root = folder_at(careless["LAKE_ROOT"])
    documents = Documents.at(root / "leases")
    assert [documents.create("lease-1", {"by": by}) for by in (1, 2)] == [True, True]
    table = root / "raced"
    writers = [_table(table), _table(table)]
    with ThreadPoolExecutor(2) as pool:
        # Neither writer learns of the other.
        list(pool.map(_commit, writers, (1, 2)))
    assert len(files_of(opened_again(table), table).to_table()["a"]) == 1


def test_no_lease_is_granted_there(careless: dict[str, str]) -> None:
    root = folder_at(careless["LAKE_ROOT"])
    control = Control.of(root, "rolling_sum")
    with pytest.raises(Refusal, match=REFUSED):
        control.reserve(Owner.this_process())
    with pytest.raises(Refusal, match=REFUSED):
        control.claim(1, Owner.this_process())
    assert control.newest() == 0


def test_a_batch_job_does_not_wait_for_it(careless: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The job waits for other writers, but here it would wait in vain."""
    monkeypatch.setattr(writing_module.time, "sleep", lambda _: pytest.fail("it waited"))
    refused = writing_module.writing(folder_at(careless["LAKE_ROOT"]), "recompute_rolling_sum")
    with pytest.raises(Refusal, match=REFUSED), refused:
        pytest.fail("it wrote")


def test_the_doctor_finds_it(careless: dict[str, str], tmp_path: Path) -> None:
    check = doctor.checks(StackSettings.from_env({**careless, "TIDELINE_HOME": str(tmp_path)}))["lake"]
    with pytest.raises(Refusal, match=REFUSED):
        check()


def test_the_doctor_says_where_a_store_is_that_does_not_answer(
    sound: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in sound.items():
        monkeypatch.setenv(name, value)
    env = {**sound, "LAKE_ROOT": "s3a://no-such-bucket/tideline", "TIDELINE_HOME": str(tmp_path)}
    with pytest.raises(Refusal, match=r"lake at s3://no-such-bucket/tideline cannot be used: .*NoSuchBucket"):
        doctor.checks(StackSettings.from_env(env))["lake"]()


def test_a_driver_ends_with_the_sentence(careless: dict[str, str]) -> None:
    env = {**os.environ, **careless}
    command = [sys.executable, "-m", "jobs", "live", "rolling_sum"]
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "\ntideline: the store of s3://lakes-" in f"\n{done.stderr}"
    assert "Traceback" not in done.stderr


@pytest.fixture(params=["disk", "bucket"])
def folder(
    request: pytest.FixtureRequest, sound: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Folder:
    if request.param == "disk":
        return tmp_path / "folder"
    for name, value in sound.items():
        monkeypatch.setenv(name, value)
    return folder_at(sound["LAKE_ROOT"]) / tmp_path.name


def test_a_sound_store_is_asked_by_many_at_once(folder: Folder) -> None:
    def ask(_: int) -> None:
        Documents.at(folder).require_exclusive_create()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert Documents.at(folder).names() == ["probe"]


def test_a_store_is_asked_once_by_a_process(folder: Folder) -> None:
    for _ in range(2):
        Documents.at(folder).require_exclusive_create()
        Documents.at(folder).delete("probe")
    assert Documents.at(folder).names() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_S3_ALLOW_UNSAFE_RENAME", "true"),
        ("AWS_S3_ALLOW_UNSAFE_RENAME", "1"),
        ("AWS_CONDITIONAL_PUT", "disabled"),
        ("AWS_CONDITIONAL_PUT", "dynamo:locks"),
    ],
)
def test_settings_that_let_writers_overwrite_each_other_are_refused(name: str, value: str) -> None:
    env = {"LAKE_ROOT": "s3a://lakes/tideline", "AWS_REGION": "eu-central-1", name: value}
    with pytest.raises(Refusal, match=f"{name}='{value}' .*: remove this setting"):
        Settings.from_env(env)
    # A lake in a folder has no such settings.
    Settings.from_env({**env, "LAKE_ROOT": "/lake"})


def test_the_same_settings_may_say_what_holds_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"LAKE_ROOT": "s3a://lakes/tideline", "AWS_REGION": "eu-central-1"}
    for name, value in {"AWS_S3_ALLOW_UNSAFE_RENAME": "false", "AWS_CONDITIONAL_PUT": "etag"}.items():
        # Undone after the test, because settings of a bucket become the process's own.
        monkeypatch.setenv(name, value)
        env[name] = value
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    Settings.from_env(env)
