"""A place for one workload: a broker of its own, empty topics and a folder."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil

from jobs import pipelines
from jobs.broker import topics
from jobs.broker.kafka import admin
from jobs.pipelines import PIPELINES
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings, Settings
from local.platform.broker import Broker
from local.platform.process import kill, terminate, wait_gone

_STOP_SECONDS = 30


@contextmanager
def place_of(
    settings: Settings, name: str, partitions: Mapping[str, int] | None = None
) -> Iterator[tuple[Settings, dict[str, str], Path]]:
    """A new broker with all topics and a new lake, for one measurement.

    Yield the settings of this process for them, the environment of other processes that use them, and their folder.
    The folder is removed afterwards, unless the measurement is refused.
    """
    asked = partitions or {}
    home, is_kept = Path(tempfile.mkdtemp(prefix=f"tideline-bench-{name}-")), False
    try:
        with Broker(home=home, jars=settings.jars / "broker") as broker:
            kafka = KafkaSettings(bootstrap=broker.bootstrap)
            # The user's settings of Kafka are left out, so that both sides of a race have the same.
            unset = {key: value for key, value in os.environ.items() if not key.startswith("KAFKA_")}
            env = {**unset, **kafka.as_env(), "LAKE_ROOT": str(home / "lake"), "TIDELINE_JARS": str(settings.jars)}
            outputs = (pipeline.topic for pipeline in PIPELINES.values())
            wanted = (*pipelines.topics(), *(replace(topic, name=f"plain_{topic.name}") for topic in outputs))
            sized = [replace(topic, partitions=asked.get(topic.name, topic.partitions)) for topic in wanted]
            with admin(kafka) as client:
                topics.apply(client, topics.survey(client, sized))
            yield replace(settings, kafka=kafka, lake_root=home / "lake"), env, home
    except Refusal as refusal:
        # The refusal may name a log in this folder.
        is_kept = True
        raise Refusal(f"{refusal}\nThe files are kept in {home}: delete them when you have read them.") from refusal
    finally:
        if not is_kept:
            shutil.rmtree(home, ignore_errors=True)


def end_driver(driver: psutil.Process) -> None:
    """End a driver and the JVM below it, which removes its temporary files before it ends."""
    with suppress(psutil.NoSuchProcess):
        family = [driver, *driver.children(recursive=True)]
        terminate([driver])
        if not wait_gone(family, _STOP_SECONDS):
            kill(family)
