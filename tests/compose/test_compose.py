"""The platform in containers, as a user sees it: built, started, fed and broken.

The tests use its published ports, and `tideline` in a container. They break parts of it while it gets records.

The tests run in order: each continues after the one before.
"""

import json
import os
import re
import secrets
import subprocess
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import httpx
import pytest
from kafka import KafkaAdminClient, KafkaProducer

from jobs.airflow_api.client import AirflowApi
from jobs.broker.kafka import admin, client_options
from jobs.pipelines import INGEST, PIPELINES, topics
from jobs.pipelines.layout import dag_id_of
from jobs.pipelines.slices import slice_at
from jobs.settings import PROJECT, KafkaSettings
from local.platform.ports import free_ports
from tests import processes
from tests.judges import oracle

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

SUM = PIPELINES["rolling_sum"]
BROKERS = ("kafka-1", "kafka-2", "kafka-3")
SERVICES = {
    *BROKERS,
    *("spark-master", "spark-worker-1", "spark-worker-2", "postgres"),
    *("api-server", "dag-processor", "triggerer", "scheduler"),
}
SECRETS = ("POSTGRES_PASSWORD", "AIRFLOW_ADMIN_PASSWORD", "AIRFLOW_SECRET_KEY", "AIRFLOW_JWT_SECRET")
MINUTE = 60_000
PER_MINUTE = 600
# More than the value of a series may be.
BROKEN = 5_000_000_000
_UP_SECONDS = 600
_WAIT_SECONDS = 240


@dataclass(kw_only=True)
class Platform:
    """A compose project of its own, on free ports; the number of sent records, and the begin of the first minute."""

    env: dict[str, str]
    ports: dict[str, int]
    first_ms: int
    sent: int = 0
    minutes: int = 0
    # Windows of slices that the audit has blocked.
    broken: set[tuple[int, str]] = field(default_factory=set)

    def compose(self, *words: str, seconds: float = _UP_SECONDS) -> str:
        """Run `docker compose` for this project. If it fails, the test fails with its output."""
        ran = subprocess.run(
            # A developer's own settings are not used.
            ["docker", "compose", "--env-file", os.devnull, *words],
            cwd=PROJECT,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
        assert ran.returncode == 0, f"docker compose {' '.join(words)}:\n{ran.stdout[-6000:]}"
        return ran.stdout

    def tideline(self, *words: str) -> str:
        """The output of a `tideline` command, run in the container of the scheduler."""
        return self.compose("exec", "-T", "scheduler", "tideline", *words)

    def docker(self, *words: str) -> str:
        """The output of the Docker engine."""
        return subprocess.run(["docker", *words], env=self.env, text=True, capture_output=True, check=True).stdout

    def up(self, *services: str) -> None:
        """Start these services, or all, and wait until they are healthy."""
        self.compose("up", "--detach", "--wait", "--wait-timeout", str(_UP_SECONDS), *services)

    def crash(self, service: str) -> None:
        """Kill all processes of a container, as in a crash.

        After `docker compose kill` Docker would not start it again; here it may.
        """
        asked = ["docker", "compose", "--env-file", os.devnull, "exec", "-T", service, "sh", "-c", "kill -9 -1"]
        # The shell is killed with its container.
        subprocess.run(asked, cwd=PROJECT, env=self.env, capture_output=True, check=False, timeout=60)

    def restarts(self, service: str) -> int:
        """How often Docker has restarted a container by itself, if it is healthy now; 0 while it is not."""
        container = self.compose("ps", "--all", "--quiet", service).strip()
        count, health = self.docker(
            "inspect", "--format", "{{.RestartCount}} {{.State.Health.Status}}", container
        ).split()
        return int(count) if health == "healthy" else 0

    @property
    def kafka(self) -> KafkaSettings:
        """The brokers, as seen from outside."""
        return KafkaSettings(bootstrap=",".join(f"127.0.0.1:{self.ports[name]}" for name in BROKERS))

    def api(self) -> AirflowApi:
        """Airflow, as seen from outside."""
        url = f"http://127.0.0.1:{self.ports['airflow']}"
        return AirflowApi(url=url, username="admin", password=self.env["AIRFLOW_ADMIN_PASSWORD"])

    def page(self, path: str) -> str:
        """A page of the console, in words."""
        with self.api() as api:
            login = {"username": api.username, "password": api.password}
            token = httpx.post(f"{api.url}/auth/token", json=login, timeout=30).json()["access_token"]
            answer = httpx.get(f"{api.url}/tideline/{path}", headers={"Authorization": f"Bearer {token}"}, timeout=30)
        assert answer.is_success, answer.text
        return re.sub(r"<[^>]+>", " ", answer.text)

    def send_minute(self, value: int = 7, count: int = PER_MINUTE, halfway: Callable[[], object] = lambda: None) -> int:
        """Send events of the next minute, which is over by now, in order; the begin of that minute.

        ``halfway`` is called before the second half.

        All are of one series, so in one partition: none may be late for a stream that reads while they are sent.
        """
        start, key = self.first_ms + self.minutes * MINUTE, f"series-{self.minutes}".encode()
        producer = KafkaProducer(**client_options(self.kafka), linger_ms=5)
        try:
            for number in range(count):
                if number == count // 2:
                    halfway()
                at = start + number * MINUTE // count
                text = json.dumps({"id": self.sent + number, "ts": at, "value": value + number % 10})
                producer.send("numbers", text.encode(), key=key)
            producer.flush(timeout=120)
        finally:
            producer.close()
        self.minutes += 1
        self.sent += count
        return start

    def epoch(self, job: str) -> int:
        """The newest driver of a stream."""
        return int(re.search(r"Epoch (\d+)", self.page(f"streams/{dag_id_of(job)}")).group(1))

    def runs(self, job: str) -> bool:
        """Whether a stream runs; a starting one does not count."""
        return bool(re.search(rf"\b{job} +running\b", self.page(f"streams/{dag_id_of(job)}")))

    def expected(self) -> dict[tuple[int, str], tuple[Decimal, int]]:
        """The windows that a naive reader of the topic computes. All sent records must be there."""
        records = oracle.read_topic(self.kafka.bootstrap, "numbers")
        assert len(records) == self.sent
        accepted = [event for record in records if (event := oracle.accept("numbers", record))]
        windows = oracle.aggregate(SUM.name, accepted)
        return {window: (values["total"], values["events"]) for window, values in windows.items()}

    def whole(self) -> dict[tuple[int, str], tuple[Decimal, int]]:
        """The windows that must be final: all except the blocked ones."""
        return {window: values for window, values in self.expected().items() if window not in self.broken}

    def published(self, topic: str) -> dict[tuple[int, str], tuple[Decimal, int]]:
        """The newest message of each window in an output topic."""
        newest = {}
        for record in sorted(oracle.read_topic(self.kafka.bootstrap, topic), key=lambda r: (r.partition, r.offset)):
            start, key = json.loads(record.key)
            start_ms = round(datetime.fromisoformat(start).timestamp() * 1000)
            row = json.loads(record.value, parse_float=Decimal) if record.value else None
            newest[start_ms, key] = (Decimal(row["total"]), row["events"]) if row else None
        return {window: values for window, values in newest.items() if values}

    def awaits(self, topic: str, wanted: dict[Any, Any]) -> None:
        """Wait until a topic holds exactly these windows."""
        processes.wait_until(lambda: self.published(topic) == wanted, f"{topic} is as expected", _WAIT_SECONDS)


@pytest.fixture(scope="module")
def platform(request: pytest.FixtureRequest) -> Iterator[Platform]:
    ports = dict(zip((*BROKERS, "airflow", "spark"), free_ports(5), strict=True))
    own = {name: value for name, value in os.environ.items() if not name.startswith(("KAFKA_", "AIRFLOW_", "SPARK_"))}
    env = {
        **own,
        **{name: secrets.token_urlsafe(48) for name in SECRETS},
        "AIRFLOW_FERNET_KEY": urlsafe_b64encode(secrets.token_bytes(32)).decode(),
        "COMPOSE_PROJECT_NAME": f"tideline-test-{os.getpid()}",
        "TIDELINE_IMAGE": "tideline-test",
        **{f"KAFKA_{number}_PORT": str(ports[f"kafka-{number}"]) for number in (1, 2, 3)},
        "AIRFLOW_PORT": str(ports["airflow"]),
        "SPARK_UI_PORT": str(ports["spark"]),
    }
    # These minutes are over, so the tests need not wait for them to pass.
    first = round(time.time() * 1000) // MINUTE * MINUTE - 20 * MINUTE
    platform = Platform(env=env, ports=ports, first_ms=first)
    try:
        yield platform
    finally:
        try:
            if request.session.testsfailed:
                said = platform.compose("ps", "--all") + platform.compose("logs", "--no-color", "--tail", "60")
                with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
                    print(said)
        finally:
            platform.compose("down", "--volumes", "--remove-orphans", "--timeout", "20")


@pytest.fixture(autouse=True)
def chapter(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Skip all tests after the first that fails; print how long each test took."""
    if request.session.testsfailed:
        pytest.skip("the story ended before")
    began = time.monotonic()
    yield
    with capsys.disabled():
        print(f" {request.node.name} {time.monotonic() - began:.0f} s ", end="", flush=True)


def tell(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Print numbers for the reader of the test's output."""
    with capsys.disabled():
        print(f"\n{text}")


def test_the_file_is_valid_and_warns_of_nothing(platform):
    assert platform.compose("config", "--quiet") == ""


@pytest.mark.timeout(1300)
def test_the_images_are_built(platform, capsys):
    # The stage that the others copy from, once; all at the same time would make it for each of them.
    platform.compose("build", "--quiet", "init", seconds=900)
    platform.compose("build", "--quiet", seconds=300)
    sizes = {}
    for name in ("kafka", "spark", "airflow", "postgres"):
        asked = ("image", "inspect", f"tideline-test-{name}", "--format", "{{.Size}} {{.Config.User}}")
        size, user = platform.docker(*asked).split()
        assert user not in ("", "root", "0")
        sizes[name] = round(int(size) / 1e6)
    tell(capsys, "images: " + ", ".join(f"{name} {size:,} MB" for name, size in sizes.items()))


def test_everything_comes_up_and_is_well(platform):
    platform.up()
    states = [json.loads(line) for line in platform.compose("ps", "--format", "json").splitlines()]
    assert {state["Service"]: state["Health"] for state in states} == dict.fromkeys(SERVICES, "healthy")
    published = [port for state in states for port in state["Publishers"] or () if port["PublishedPort"]]
    assert {port["URL"] for port in published} == {"127.0.0.1"}


def test_topics_are_kept_three_times(platform):
    used = {"provision_topics", dag_id_of(INGEST), dag_id_of(SUM.name), SUM.recompute_job}
    with platform.api() as api:
        processes.wait_until(lambda: used <= api.dags().keys(), "the DAGs are read", _WAIT_SECONDS)
        assert api.import_errors() == []
        api.unpause("provision_topics")
        assert api.wait_for_run("provision_topics", api.trigger("provision_topics"), _WAIT_SECONDS) == "success"
    with admin(platform.kafka) as client:
        for topic in client.describe_topics([topic.name for topic in topics()]):
            for partition in topic["partitions"]:
                assert (len(partition["replica_nodes"]), len(partition["isr_nodes"])) == (3, 3), topic


def test_windows_are_live_and_then_final_and_a_broken_slice_is_blocked(platform):
    with platform.api() as api:
        for job in (INGEST, SUM.name):
            api.unpause(dag_id_of(job))
    platform.send_minute()
    platform.send_minute()
    sound = platform.expected()
    broken = slice_at(SUM, platform.send_minute(value=BROKEN, count=20)).name
    platform.broken |= platform.expected().keys() - sound.keys()
    platform.awaits(SUM.output, platform.expected())
    processes.wait_until(lambda: all(map(platform.runs, (INGEST, SUM.name))), "both streams run", _WAIT_SECONDS)
    states = json.loads(platform.tideline("streams", "status", INGEST, SUM.name, "--format", "json"))
    assert {state["job"]: state["state"] for state in states["streams"]} == dict.fromkeys((INGEST, SUM.name), "running")
    with platform.api() as api:
        api.unpause(SUM.recompute_job)
    platform.awaits(SUM.final_topic.name, sound)
    said = f"{broken} blocked"
    processes.wait_until(
        lambda: said in " ".join(platform.page(f"slices/{SUM.recompute_job}").split()), said, _WAIT_SECONDS
    )


def test_a_broker_dies_and_nothing_is_lost(platform):
    platform.send_minute(halfway=lambda: platform.compose("kill", "kafka-2"))
    platform.awaits(SUM.output, platform.expected())
    platform.up("kafka-2")
    with admin(platform.kafka) as client:
        processes.wait_until(lambda: in_sync(client) == {3}, "the broker has caught up", _WAIT_SECONDS)


def in_sync(client: KafkaAdminClient) -> set[int]:
    """How many replicas of the partitions are in sync."""
    (topic,) = client.describe_topics(["numbers"])
    return {len(partition["isr_nodes"]) for partition in topic["partitions"]}


def test_spark_workers_and_their_master_die_and_the_streams_go_on(platform):
    epochs = {job: platform.epoch(job) for job in (INGEST, SUM.name)}
    platform.send_minute(halfway=lambda: platform.compose("kill", "spark-worker-1"))
    platform.awaits(SUM.output, platform.expected())
    platform.up("spark-worker-1")
    platform.send_minute(halfway=lambda: platform.crash("spark-worker-2"))
    platform.awaits(SUM.output, platform.expected())
    processes.wait_until(lambda: platform.restarts("spark-worker-2") == 1, "Docker starts it again", _WAIT_SECONDS)
    platform.send_minute(halfway=lambda: platform.compose("kill", "spark-master"))
    platform.up("spark-master")
    platform.awaits(SUM.output, platform.expected())
    assert {job: platform.epoch(job) for job in (INGEST, SUM.name)} == epochs, "the same drivers"


# Kills only the scheduler, and not the process that started it.
KILL_SCHEDULER = """
import contextlib, psutil
for process in psutil.process_iter():
    with contextlib.suppress(psutil.Error):
        if process.cmdline()[-2:] == ["airflow", "scheduler"]:
            process.kill()
"""


def test_the_scheduler_dies_and_the_drivers_go_on(platform):
    epochs = {job: platform.epoch(job) for job in (INGEST, SUM.name)}
    killed = datetime.now(UTC)
    kill = ("exec", "-T", "scheduler", "python", "-c", KILL_SCHEDULER)
    platform.send_minute(halfway=lambda: platform.compose(*kill))
    platform.awaits(SUM.output, platform.expected())
    with platform.api() as api:
        processes.wait_until(lambda: api.beats_since("scheduler", killed), "another schedules", _WAIT_SECONDS)
    assert "it is started again in" in platform.compose("logs", "--no-color", "scheduler")
    assert {job: platform.epoch(job) for job in (INGEST, SUM.name)} == epochs, "the same drivers"


def test_the_container_of_the_drivers_dies_and_others_take_over(platform):
    epochs = {job: platform.epoch(job) for job in (INGEST, SUM.name)}
    # A batch job is killed with the container, too.
    platform.send_minute()
    platform.awaits(SUM.output, platform.expected())
    with platform.api() as api:
        api.trigger(SUM.recompute_job, {"dry_run": False, "reason": "the next minute"})
        processes.wait_until(lambda: recomputes(api), "a recompute is under way", _WAIT_SECONDS)
    platform.send_minute(halfway=lambda: platform.compose("kill", "scheduler"))
    platform.up("scheduler")
    platform.awaits(SUM.output, platform.expected())
    taken_over = lambda: all(platform.epoch(job) > before for job, before in epochs.items())  # noqa: E731
    processes.wait_until(taken_over, "each stream has another driver", _WAIT_SECONDS)


def recomputes(api: AirflowApi) -> bool:
    """Whether Spark computes slices, for any run."""
    runs = [run["dag_run_id"] for run in api.runs(SUM.recompute_job) if run["state"] == "running"]
    tasks = [task for run in runs for task in api.task_instances(SUM.recompute_job, run)]
    return any(task["task_id"] == "recompute" and task["state"] == "running" for task in tasks)


def test_all_of_it_becomes_final(platform, capsys):
    # Airflow notices within a minute that the task was killed with its container, and runs it again.
    platform.awaits(SUM.final_topic.name, platform.whole())
    names = platform.compose("ps", "--quiet").split()
    tell(capsys, platform.docker("stats", "--no-stream", "--format", "{{.Name}} {{.MemUsage}}", *names))


def test_what_is_stopped_and_started_again_has_all_its_data(platform):
    whole, epochs = platform.whole(), {job: platform.epoch(job) for job in (INGEST, SUM.name)}
    platform.compose("down", "--timeout", "90")
    # Secrets may change while nothing runs.
    platform.env["POSTGRES_PASSWORD"] = f"it's {secrets.token_urlsafe(24)}"
    platform.up()
    assert platform.published(SUM.final_topic.name) == whole
    for job, epoch in epochs.items():
        # Number, begin, end, and the kind of end: `stopped`, since the driver was asked to stop.
        assert re.search(rf"\b{epoch}( +\S+ \S+ UTC){{2}} +stopped\b", platform.page(f"streams/{dag_id_of(job)}")), job
    platform.send_minute()
    platform.awaits(SUM.output, platform.expected())


def test_down_with_volumes_leaves_nothing(platform):
    platform.compose("down", "--volumes", "--timeout", "30")
    label = f"label=com.docker.compose.project={platform.env['COMPOSE_PROJECT_NAME']}"
    for kind in (["ps", "--all"], ["volume", "ls"], ["network", "ls"]):
        assert platform.docker(*kind, "--quiet", "--filter", label) == ""
