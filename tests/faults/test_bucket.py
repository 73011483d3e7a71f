"""A lake in a bucket, on a real S3 server: the real jobs run from the first record to a reset, and are killed twice."""

import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.finality.run.folder import RunFolder
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines import PIPELINES
from jobs.query.lake import Lake
from jobs.settings import PROJECT, Settings
from jobs.storage.bucket import Bucket
from jobs.storage.folders import folder_at
from tests import processes
from tests.judges import checker, oracle
from tests.storage import object_store

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SUM = PIPELINES["rolling_sum"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    with object_store.serving(tmp_path / "server.log") as env:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        yield env


def test_a_lake_in_a_bucket_is_as_good_as_one_on_a_disk(
    settings: Settings, store: dict[str, str], tmp_path: Path
) -> None:
    there = folder_at(store["LAKE_ROOT"])
    assert isinstance(there, Bucket)
    env = processes.environment(replace(settings, lake_root=there))
    progress = tmp_path / "progress"
    # At F3 the table has the micro-batch, but its checkpoint does not.
    # At F6 the slices are final, but ledger and topic do not show it.
    for point, chapter in (("F3", "live"), ("F6", "final")):
        done = tell(progress, env, TIDELINE_FAILPOINT=f"{point}:0:{tmp_path / point}")
        assert done.returncode == -signal.SIGKILL, done.stderr[-6000:]
        assert (tmp_path / point).exists()
        assert chapter not in progress.read_text().splitlines()
    done = tell(progress, env)
    assert done.returncode == 0, done.stderr[-6000:]
    assert re.findall(r"(?m)^.*\b(?:WARN|ERROR)\b.*$", done.stdout + done.stderr) == []

    lake = object_store.copied(there, tmp_path / "copy")
    records = oracle.read_topic(settings.kafka.bootstrap, "numbers")
    assert len(records) == 800
    assert checker.landed_defects(lake, "numbers", records) == []
    clicks = oracle.read_topic(settings.kafka.bootstrap, "clicks")
    assert checker.landed_defects(lake, "clicks", clicks) == []
    assert len(list((lake / "events" / "clicks").glob("hour=*"))) >= 60, "all in one micro-batch"
    assert checker.live_defects(lake, SUM.name, records) == []
    # The last run of the story that made all slices final that were over.
    due_ms = RunFolder.of(PipelineLake(lake, SUM), "second").plan().as_of_ms
    assert checker.final_defects(lake, SUM.name, records, due_ms=due_ms) == []
    here, copy = Lake(there), Lake(lake)
    for question in (
        "SELECT * FROM rolling_sum ORDER BY window_start, key",
        'SELECT slice, version, state, reason FROM ledger_rolling_sum ORDER BY "commit", slice',
        "SELECT count(*) FROM quarantine_numbers",
        "SELECT count(*) FROM events_clicks",
    ):
        assert here.query(question).to_pylist() == copy.query(question).to_pylist()
    versions = here.query("SELECT slice, version FROM slices_rolling_sum ORDER BY slice").to_pylist()
    counts = Counter(row["version"] for row in versions)
    assert counts[3] == 1, "rolled back"
    assert counts[2] > 1, "restated"
    balance = here.query("SELECT unexplained FROM balance_rolling_sum WHERE kind = 'slice'").to_pylist()
    assert len(balance) > len(versions)
    assert {row["unexplained"] for row in balance} == {0}
    for table in ("live/rolling_sum", "events/numbers"):
        assert list((there / table / "_staging").iterdir()) == [], "neither files nor Hadoop's marks of folders"


def tell(progress: Path, env: dict[str, str], **more: str) -> subprocess.CompletedProcess[str]:
    story = [sys.executable, "-m", "tests.faults.bucket_story", str(progress)]
    env = {**env, **more}
    return subprocess.run(story, env=env, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=500)
