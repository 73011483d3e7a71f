"""The DAGs that make slices final, on a real Airflow, broker and Spark. Each test continues after the one before."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer
from pyspark.sql import SparkSession

from jobs.control.incident import blocked_key
from jobs.control.incidents import Incidents
from jobs.lake.final import FinalTable
from jobs.lake.ledger import Ledger
from jobs.lake.slices import Header
from jobs.pipelines import PIPELINES
from jobs.pipelines.slices import Slice, slice_at
from jobs.query.lake import Lake
from jobs.settings import KafkaSettings, Settings
from jobs.streaming import ingest
from tests.conftest import renew_topics
from tests.judges import checker, oracle

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.timeout(900)]

Run = Callable[..., dict[str, Any]]
SUM = PIPELINES["rolling_sum"]
DAG = SUM.recompute_job
TASKS = ("plan", "recompute", "audit", "publish", "all_final")
# More than the value of a series may be.
BROKEN = 5_000_000_000


class World:
    """A lake, a topic, and an Airflow that works on them."""

    def __init__(self, settings: Settings, run: Run) -> None:
        self.settings, self._run = settings, run
        # So long ago that all these slices are over, by several slices.
        self.slices = [slice_at(SUM, round(time.time() * 1000) - minutes * 60_000) for minutes in (8, 7, 6, 5)]
        # The begin of the last run that made every slice final that was over.
        self.due_ms = 0

    def land(self, *slices: Slice, value: int = 7) -> None:
        """A few events in each slice."""
        producer = KafkaProducer(bootstrap_servers=self.settings.kafka.bootstrap)
        for slice_ in slices:
            for number in range(20):
                at = slice_.start_ms + number * 997
                text = b'{"id":%d,"ts":%d,"value":%d}' % (number, at, value)
                producer.send("numbers", text, key=b"k%d" % (number % 3), partition=number % 3)
        producer.close()
        ingest.run(self.settings, until_caught_up=True)

    def run(self, dag_id: str = DAG, **conf: Any) -> dict[str, Any]:
        return self._run(dag_id, conf, LAKE_ROOT=str(self.settings.lake_root), SPARK_DRIVER_MEMORY="600m")

    def headers(self) -> dict[str, Header]:
        final = FinalTable.read(self.settings.lake_root, SUM)
        return final.headers() if final else {}

    def defects(self) -> list[str]:
        records = oracle.read_topic(self.settings.kafka.bootstrap, "numbers")
        return checker.final_defects(self.settings.lake_root, SUM.name, records, due_ms=self.due_ms)


@pytest.fixture(scope="module")
def world(run: Run, kafka: KafkaSettings, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> World:
    renew_topics(kafka)
    folder = tmp_path_factory.mktemp("recompute")
    env = {"LAKE_ROOT": str(folder / "lake"), "SPARK_MASTER": "local[2]", **kafka.as_env()}
    made = World(Settings.from_env(env), run)
    made.land(*made.slices[:3])
    return made


def interval(*slices: Slice) -> dict[str, str]:
    return {"from": slices[0].start.isoformat(), "to": slices[-1].end.isoformat()}


def states(done: dict[str, Any]) -> list[str]:
    return [done["tasks"][name] for name in TASKS]


def test_a_dry_run_shows_the_plan_and_writes_nothing(world: World) -> None:
    done = world.run()
    assert done["state"] == "success", done["log"][-5000:]
    assert states(done) == ["success", "skipped", "skipped", "skipped", "skipped"]
    said = done["xcoms"]["plan.return_value"]
    assert {row["slice"] for row in said["slices"]} >= {slice_.name for slice_ in world.slices[:3]}
    assert done["note"].startswith("A dry run: nothing is changed.")
    assert f"│ {world.slices[0].name} │ closed │" in done["log"]
    assert Ledger.read(world.settings.lake_root, SUM) is None
    assert not (world.settings.lake_root / SUM.final_table).exists()


def test_a_run_publishes_all_that_is_due_and_the_next_finds_nothing(world: World) -> None:
    world.due_ms = round(time.time() * 1000)
    done = world.run(dry_run=False)
    assert states(done) == ["success"] * 5, done["log"][-5000:]
    assert {slice_.name for slice_ in world.slices[:3]} <= set(world.headers())
    assert world.defects() == []
    assert done["xcoms"]["publish.return_value"].keys() == world.headers().keys()
    assert "Spark-Submit cmd" not in done["log"]
    links = {name for name in done["xcoms"] if "_link_" in name}
    assert {"plan._link_SlicesLink", "audit._link_DataDocsLink", "publish._link_SlicesLink"} <= links
    assert list((world.settings.lake_root / "quality" / SUM.name).glob("*.html"))


def test_an_interval_is_restated_and_nothing_else(world: World) -> None:
    before = world.headers()
    done = world.run(dry_run=False, reason="a trial", **interval(world.slices[1]))
    assert states(done) == ["success"] * 5, done["log"][-5000:]
    after = world.headers()
    assert {name for name in after if after[name].version != before[name].version} == {world.slices[1].name}
    assert (after[world.slices[1].name].version, after[world.slices[1].name].reason) == (2, "a trial")
    assert world.defects() == []


@pytest.mark.parametrize(
    ("conf", "sentence"),
    [
        ({"from": "2100-01-01T00:00:00Z", "to": "2100-01-01T00:01:00Z", "reason": "r"}, "it is not over"),
        ({"from": "2026-01-01T00:00:00Z", "to": "2026-01-01T00:01:00Z"}, "needs a reason: set reason"),
    ],
)
def test_what_cannot_be_done_fails_at_once_and_says_why(world: World, conf: dict[str, str], sentence: str) -> None:
    before = world.headers()
    done = world.run(dry_run=False, **conf)
    assert done["state"] == "failed"
    assert done["tasks"]["plan"] == "failed"
    assert sentence in done["log"]
    assert world.headers() == before


def test_a_blocked_slice_makes_the_audit_red_and_the_others_are_published(world: World) -> None:
    bad, good = world.slices[3], world.slices[2]
    world.land(bad, value=BROKEN)
    before = world.headers()
    done = world.run(dry_run=False, reason="a trial", **interval(good, bad))
    assert done["state"] == "failed"
    assert states(done) == ["success", "success", "failed", "success", "upstream_failed"], done["log"][-5000:]
    after = world.headers()
    assert after[good.name].version == before[good.name].version + 1
    assert after.get(bad.name) == before.get(bad.name)
    assert f"Slice {bad.name} is blocked: rule 'mean " in done["log"]
    assert set(done["xcoms"]["publish.return_value"]) == {good.name}
    (incident,) = Incidents.of(world.settings.lake_root).still_open(f"recompute.{SUM.name}.")
    assert incident.key == blocked_key(SUM.name, bad.name)
    assert incident.link is not None
    assert f"/tideline/quality/{DAG}/" in incident.link


def test_every_final_slice_is_accounted_for_once(world: World) -> None:
    done = world.run(SUM.account_job)
    assert done["state"] == "success", done["log"][-5000:]
    lake = Lake(world.settings.lake_root)
    sql = f"SELECT slice, version, unexplained FROM balance_{SUM.name} WHERE kind = 'slice'"
    accounts = lake.query(sql).to_pylist()
    assert sorted((row["slice"], row["version"]) for row in accounts) == sorted(
        (name, header.version) for name, header in world.headers().items()
    )
    assert {row["unexplained"] for row in accounts} == {0}
    assert world.run(SUM.account_job)["state"] == "success"
    assert lake.query(sql).num_rows == len(accounts)


def test_a_roll_back_shows_first_and_then_serves_the_earlier_version(world: World) -> None:
    name, before = world.slices[1].name, world.headers()
    conf = {"pipeline": SUM.name, "slice": name, "to_version": 1}
    shown = world.run("rollback_slice", **conf)
    assert shown["state"] == "success", shown["log"][-5000:]
    assert f"version 1: {before[name].rows} rows, checksum {before[name].checksum}" in json.dumps(shown["xcoms"])
    assert world.headers() == before
    assert world.run("rollback_slice", **conf, apply=True)["state"] == "failed"
    done = world.run("rollback_slice", **conf, apply=True, reason="2026")
    assert done["state"] == "success", done["log"][-5000:]
    assert world.headers()[name].version == 3
    assert world.headers()[name].reason.endswith(": 2026")


def test_what_is_served_is_checked(world: World) -> None:
    done = world.run(SUM.check_job)
    assert done["state"] == "success", done["log"][-5000:]
    final = FinalTable.read(world.settings.lake_root, SUM)
    assert final is not None
    file = next(iter((final.path / f"slice={world.slices[0].name}").glob("*.parquet")))
    _overwrite(final, world.slices, file)
    done = world.run(SUM.check_job)
    assert done["state"] == "failed"
    assert world.slices[0].name in done["log"]


def _overwrite(final: FinalTable, slices: list[Slice], file: Path) -> None:
    """Put the rows of one slice in the place of another's."""
    other = next(iter((final.path / f"slice={slices[1].name}").glob("*.parquet")))
    file.write_bytes(other.read_bytes())
