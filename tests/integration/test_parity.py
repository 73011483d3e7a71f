"""The parity kit: event histories that Hypothesis makes, through the real broker and the real jobs.

Final equals the oracle, and every event that the stream has missed is explained: no window has an unexplained rest.
"""

import os
import shutil
import time
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, example, given, seed
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from jobs.finality import account
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines import PIPELINES
from jobs.query.lake import Lake
from jobs.settings import Settings
from jobs.streaming import ingest, live
from tests import batch
from tests.conftest import Produce, renew_topics
from tests.judges import checker, oracle
from tests.judges.oracle import Record

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.timeout(900)]

# Three minutes, so that windows of a minute fall into several slices.
SPAN_MS = 180_000


@dataclass(frozen=True)
class Batch:
    """The records that arrive between two runs of the stream; ``live`` says whether the stream runs after them."""

    seed: int
    count: int
    late: float
    duplicate: float
    corrupt: float
    ahead: float
    idle_partition: int
    live: bool


# Hypothesis tries the first of a choice first: a history that has every fault.
batches = st.builds(
    Batch,
    seed=st.integers(1, 2**32),
    count=st.integers(20, 250),
    late=st.sampled_from([0.5, 0.1, 0]),
    duplicate=st.sampled_from([0.2, 0]),
    corrupt=st.sampled_from([0.1, 0]),
    ahead=st.sampled_from([0.05, 0]),
    idle_partition=st.sampled_from([1, -1, 0, 2]),
    live=st.sampled_from([True, False]),
)
histories = st.lists(batches, min_size=2, max_size=4)
FAULTS = Batch(seed=1, count=120, late=0.3, duplicate=0.2, corrupt=0.1, ahead=0.05, idle_partition=1, live=True)
# The stream is down for a while, catches up, and is down again when the slices become final.
DOWN_AND_BEHIND = [
    FAULTS,
    replace(FAULTS, seed=2),
    replace(FAULTS, seed=3, live=False),
    # The watermark of the batch before the last decides whether an event is late.
    replace(FAULTS, seed=4, idle_partition=-1),
    replace(FAULTS, seed=5, live=False),
]


def drawn(chance: Random) -> list[Batch]:
    """A random history. Hypothesis would try the simplest first, and there is not always time for a second."""
    return [
        Batch(
            seed=chance.randrange(2**32),
            count=chance.randrange(60, 250),
            late=chance.choice((0.5, 0.1)),
            duplicate=chance.choice((0.2, 0)),
            corrupt=chance.choice((0.1, 0)),
            ahead=chance.choice((0.05, 0)),
            idle_partition=chance.choice((1, -1, 0, 2)),
            live=chance.random() < 0.7,
        )
        for _ in range(chance.randrange(2, 5))
    ]


def events(batch_: Batch, position: float) -> list[tuple[int, int]]:
    """Time and series of each event, around this position of the history; shuffled.

    Some are long ago or ahead of the clock.
    """
    chance, now = Random(batch_.seed), int(time.time() * 1000)
    middle = now - SPAN_MS + round(position * SPAN_MS)
    made = []
    for _ in range(batch_.count):
        at = middle + chance.randrange(-3_000, 3_000)
        if chance.random() < batch_.late:
            at -= chance.choice((4_000, 8_000, 70_000, 200_000))
        if chance.random() < batch_.ahead:
            at = now + chance.randrange(6_000, 30_000)
        made.append((at, chance.randrange(4)))
    chance.shuffle(made)
    return made


def records(batch_: Batch, position: float, pipeline: str) -> list[Record]:
    """The shuffled records of a batch.

    A repeat is the same to the byte, since a producer sends a record again that was not acknowledged.
    """
    chance, made = Random(batch_.seed + 1), list[Record]()
    partitions = [number for number in range(3) if number != batch_.idle_partition]
    for number, (at, series) in enumerate(events(batch_, position)):
        if pipeline == "word_count":
            value, headers = b"sea tide s\xc3\xa9a %d" % series, (("ts", b"%d" % at),)
        else:
            value, headers = b'{"id":%d,"ts":%d,"value":%d.125}' % (number, at, number - 50), ()
        if chance.random() < batch_.corrupt:
            value = value[: len(value) // 2] + b"\xff"
        partition = chance.choice(partitions)
        record = Record(partition=partition, arrival_ms=0, key=b"k%d" % series, value=value, headers=headers)
        made += [record] * (2 if chance.random() < batch_.duplicate else 1)
    return made


@pytest.mark.parametrize("name", PIPELINES)
def test_final_is_right_and_every_difference_is_explained(
    name: str, spark: SparkSession, settings: Settings, produce: Produce
) -> None:
    pipeline, topic = PIPELINES[name], PIPELINES[name].source.name

    @seed(20261118)
    @given(histories)
    @example(drawn(Random(name)))
    @hypothesis_settings(
        max_examples=int(os.environ.get("PARITY_EXAMPLES", "1")),
        deadline=None,
        database=None,
        phases=[Phase.explicit, *([Phase.generate] if "PARITY_EXAMPLES" in os.environ else [])],
        suppress_health_check=list(HealthCheck),
    )
    def check(history: list[Batch]) -> None:
        fresh(settings)
        for number, batch_ in enumerate(history):
            produce(topic, records(batch_, number / len(history), name))
            if batch_.live:
                live.run(settings, pipeline, until_caught_up=True)
        ingest.run(settings, until_caught_up=True)
        assert not batch.whole(settings, pipeline, "first").blocked
        assert defects(settings, name, "first") == []
        account.run(PipelineLake(settings.lake_root, pipeline), settings, "account-1")
        judge(settings, name)
        if history == DOWN_AND_BEHIND:
            assert causes(settings, name) >= {"late", "ahead", "not_reached"}
        # The stream catches up; late events of final slices come, and reopen them.
        produce(topic, records(history[0], 0.5, name))
        live.run(settings, pipeline, until_caught_up=True)
        ingest.run(settings, until_caught_up=True)
        batch.whole(settings, pipeline, "second")
        account.run(PipelineLake(settings.lake_root, pipeline), settings, "account-2")
        assert defects(settings, name, "second") == []
        judge(settings, name)

    # Once is enough: with windows that overlap it is the hardest.
    (example(DOWN_AND_BEHIND)(check) if name == "rolling_sum_sliding" else check)()


def fresh(settings: Settings) -> None:
    """Every example has a lake of its own."""
    shutil.rmtree(settings.lake_root, ignore_errors=True)
    renew_topics(settings.kafka)


def causes(settings: Settings, name: str) -> set[str]:
    found = Lake(settings.lake_root).query(f"SELECT DISTINCT cause FROM balance_{name} WHERE kind = 'cause'")
    return set(found.column("cause").to_pylist())


def defects(settings: Settings, name: str, run: str) -> list[str]:
    records = oracle.read_topic(settings.kafka.bootstrap, PIPELINES[name].source.name)
    due_ms = batch.planned_ms(settings, PIPELINES[name], run)
    return checker.final_defects(settings.lake_root, name, records, due_ms=due_ms)


def judge(settings: Settings, name: str) -> None:
    lake = Lake(settings.lake_root)
    accounts = lake.query(f"SELECT * FROM balance_{name} WHERE kind = 'slice'").to_pylist()
    headers = lake.query(
        f"SELECT DISTINCT final_slice FROM lake_final_{name} WHERE final_slice IS NOT NULL"
    ).to_pylist()
    assert {row["slice"] for row in accounts} == {row["final_slice"] for row in headers}
    assert [row for row in accounts if row["unexplained"] != 0] == []
    differing = lake.query(f"SELECT * FROM drift_{name}").to_pylist()
    assert [row for row in differing if row["live"] != row["final"] and not row["causes"]] == [], "each has a cause"
