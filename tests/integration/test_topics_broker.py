"""Topics as code against a real broker: Kafka then has what was planned, and security settings give access."""

import dataclasses
import datetime
import ipaddress
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kafka import KafkaConsumer, KafkaProducer
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ConfigResource,
    ResourcePattern,
    ResourcePatternFilter,
    ResourceType,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from kafka.errors import KafkaError

from jobs import pipelines
from jobs.broker import topics
from jobs.broker.clock import broker_clock
from jobs.broker.kafka import admin, client_options, describe, topic_ids
from jobs.broker.topics import Action
from jobs.finality import planning
from jobs.lake import final_topic
from jobs.lake.pipeline_lake import PipelineLake
from jobs.pipelines import PIPELINES
from jobs.pipelines.source import Topic
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings, Settings
from jobs.streaming import reset
from jobs.traffic import generator as traffic
from local.kafka_rights import Right, rights
from local.platform.broker import Broker
from local.platform.ports import LOOPBACK, free_port
from tests.conftest import grow_topic, renew_topics
from tests.processes import wait_until

pytestmark = pytest.mark.integration

USER = "tide"
# This user has only the rights that a test grants it.
MODEST = "modest"
_MODULES = "org.apache.kafka.common.security"
PASSWORD = "pa\"ss\\ w;o'rd=x"


@dataclass(frozen=True, kw_only=True)
class SecuredBroker(Broker):
    """A broker with a second listener: TLS with certificates on both sides, and a login."""

    secured_port: int = field(default_factory=free_port)

    @property
    def secured(self) -> str:
        return f"{LOOPBACK}:{self.secured_port}"

    def _properties(self) -> dict[str, object]:
        own = super()._properties()
        escaped = PASSWORD.replace("\\", "\\\\").replace('"', '\\"')
        # A properties file interprets backslashes once more.
        users = f'user_{USER}="{escaped}" user_{MODEST}="{escaped}"'
        plain = f"{_MODULES}.plain.PlainLoginModule required {users};".replace("\\", "\\\\")
        door = "listener.name.secured"
        return {
            **own,
            "listeners": f"{own['listeners']},SECURED://{self.secured}",
            "advertised.listeners": f"{own['advertised.listeners']},SECURED://{self.secured}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURED:SASL_SSL",
            "inter.broker.listener.name": "PLAINTEXT",
            f"{door}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
            f"{door}.plain.sasl.jaas.config": plain,
            f"{door}.scram-sha-256.sasl.jaas.config": f"{_MODULES}.scram.ScramLoginModule required;",
            f"{door}.ssl.client.auth": "required",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            # A client of the first listener has no name.
            "super.users": f"User:ANONYMOUS;User:{USER}",
            f"{door}.ssl.truststore.type": "PEM",
            f"{door}.ssl.truststore.location": self.home / "ca.pem",
            f"{door}.ssl.keystore.type": "PEM",
            f"{door}.ssl.keystore.certificate.chain": _one_line(self.home / "cert.pem"),
            f"{door}.ssl.keystore.key": _one_line(self.home / "key.pem"),
        }


def _one_line(pem: Path) -> str:
    return pem.read_text().strip().replace("\n", "\\n")


def write_certificates(folder: Path) -> None:
    """A CA and one certificate that serves both sides, for an hour."""
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name: str, key, issuer: str, issuer_key, *, is_ca: bool) -> x509.Certificate:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOOPBACK))]), critical=False
            )
            .sign(issuer_key, hashes.SHA256())
        )

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    pem, pkcs8, open_ = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ca = certificate("ca", ca_key, "ca", ca_key, is_ca=True)
    (folder / "ca.pem").write_bytes(ca.public_bytes(pem))
    (folder / "cert.pem").write_bytes(certificate("tide", key, "ca", ca_key, is_ca=False).public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, pkcs8, open_))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    home = tmp_path_factory.mktemp("topics")
    write_certificates(home)
    with SecuredBroker(home=home) as running:
        yield running


@pytest.fixture(scope="module")
def kafka(broker: SecuredBroker) -> KafkaSettings:
    return KafkaSettings(bootstrap=broker.bootstrap)


def secured(broker: SecuredBroker, mechanism: str = "PLAIN", user: str = USER) -> KafkaSettings:
    return KafkaSettings(
        bootstrap=broker.secured,
        security_protocol="SASL_SSL",
        sasl_mechanism=mechanism,
        username=user,
        password=PASSWORD,
        ssl_cafile=str(broker.home / "ca.pem"),
        ssl_certfile=str(broker.home / "cert.pem"),
        ssl_keyfile=str(broker.home / "key.pem"),
    )


def topic(name: str, **changed) -> Topic:
    configs = (("cleanup.policy", "delete"), ("message.timestamp.type", "LogAppendTime"), ("retention.ms", "7200000"))
    return dataclasses.replace(Topic(name=name, partitions=2, configs=configs, moves_keys=False), **changed)


def retained(name: str, hours: int) -> Topic:
    return topic(name, configs=(("cleanup.policy", "delete"), ("retention.ms", str(hours * 3_600_000))))


def provision(kafka: KafkaSettings, *wanted: Topic) -> list[Action]:
    with admin(kafka) as client:
        steps = topics.survey(client, wanted)
        topics.apply(client, steps)
        return [step.action for step in steps]


def send(kafka: KafkaSettings, name: str) -> None:
    with KafkaProducer(**client_options(kafka)) as producer:
        producer.send(name, b"a record", key=b"a key").get(timeout=30)


def config_of(kafka: KafkaSettings, name: str, config: str) -> str:
    with admin(kafka) as client:
        return client.describe_configs([ConfigResource("topic", name)], config_filter="all")["topic"][name][config][
            "value"
        ]


def test_the_definitions_are_created_once_and_kept_ever_after(kafka: KafkaSettings) -> None:
    wanted = pipelines.topics()
    assert provision(kafka, *wanted) == [Action.CREATE] * len(wanted)
    assert provision(kafka, *wanted) == [Action.KEEP] * len(wanted)
    found = describe(kafka, [one.name for one in wanted])
    assert {name: state.partitions for name, state in found.items()} == {one.name: one.partitions for one in wanted}
    assert config_of(kafka, "numbers", "message.timestamp.type") == "LogAppendTime"
    for name in ("sums", "sums.final"):
        assert config_of(kafka, name, "cleanup.policy") == "compact,delete"
        assert config_of(kafka, name, "retention.ms") == str(90 * 24 * 3_600_000)


def test_a_topic_grows_and_is_aligned_with_its_records_in_place(kafka: KafkaSettings) -> None:
    provision(kafka, retained("grows", hours=1))
    send(kafka, "grows")
    before = describe(kafka, ["grows"])["grows"]
    assert provision(kafka, topic("grows", partitions=5)) == [Action.GROW, Action.ALIGN]
    after = describe(kafka, ["grows"])["grows"]
    assert (after.partitions, after.topic_id, sum(after.latest.values())) == (5, before.topic_id, 1)
    assert config_of(kafka, "grows", "message.timestamp.type") == "LogAppendTime"
    assert config_of(kafka, "grows", "retention.ms") == "7200000"


def test_an_output_topic_of_an_older_release_gets_its_retention_and_keeps_young_messages(kafka: KafkaSettings) -> None:
    sums = dataclasses.replace(pipelines.PIPELINES["rolling_sum"].topic, name="older_sums")
    provision(kafka, dataclasses.replace(sums, configs=(("cleanup.policy", "compact"),)))
    send(kafka, sums.name)
    assert provision(kafka, sums) == [Action.ALIGN]
    assert {name: config_of(kafka, sums.name, name) for name, _ in sums.configs} == dict(sums.configs)
    assert sum(describe(kafka, [sums.name])[sums.name].latest.values()) == 1
    assert sum(describe(kafka, [sums.name])[sums.name].earliest.values()) == 0
    assert provision(kafka, sums) == [Action.KEEP]


def test_aligning_leaves_other_configs_alone(kafka: KafkaSettings) -> None:
    provision(kafka, topic("own", configs=(("max.message.bytes", "4242"),)))
    provision(kafka, topic("own"))
    assert config_of(kafka, "own", "max.message.bytes") == "4242"


@pytest.mark.parametrize(
    ("name", "there", "wanted", "reason"),
    [
        ("shrinks", topic("shrinks"), topic("shrinks", partitions=1), "would delete records"),
        ("moves", topic("moves"), topic("moves", partitions=3, moves_keys=True), "would send keys"),
        ("forgets", topic("forgets"), retained("forgets", hours=1), "would delete records that are kept 2 h"),
        ("compacts", topic("compacts"), topic("compacts", configs=(("cleanup.policy", "compact"),)), "newest record"),
    ],
)
def test_what_would_lose_data_is_refused_and_nothing_else_is_done(
    kafka: KafkaSettings, name: str, there: Topic, wanted: Topic, reason: str
) -> None:
    provision(kafka, there)
    send(kafka, name)
    with pytest.raises(Refusal, match=f"nothing was applied.*{name}.*{reason}"):
        provision(kafka, topic(f"beside_{name}"), wanted)
    assert set(describe(kafka, [name, f"beside_{name}"])) == {name}
    assert provision(kafka, there) == [Action.KEEP]


def test_an_empty_topic_has_nothing_to_lose(kafka: KafkaSettings) -> None:
    provision(kafka, topic("empty"))
    compacted = topic("empty", partitions=3, moves_keys=True, configs=(("cleanup.policy", "compact"),))
    assert provision(kafka, compacted) == [Action.GROW, Action.ALIGN]


def test_a_recreated_topic_has_another_id_and_a_missing_one_is_absent(kafka: KafkaSettings) -> None:
    provision(kafka, topic("again"))
    with admin(kafka) as client:
        first = topic_ids(client, ["again", "missing"])
        client.delete_topics(["again"])
        # The broker answers before it has forgotten it.
        wait_until(lambda: "again" not in client.list_topics(), "the topic is gone")
    provision(kafka, topic("again"))
    state = describe(kafka, ["again", "missing"])
    assert set(first) == set(state) == {"again"}
    assert state["again"].topic_id != first["again"]


def test_offsets_count_what_is_there(kafka: KafkaSettings) -> None:
    provision(kafka, topic("counted", partitions=1))
    send(kafka, "counted")
    state = describe(kafka, ["counted"])["counted"]
    assert (state.earliest, state.latest) == ({0: 0}, {0: 1})
    assert state.cluster_id


def test_the_commands_plan_and_apply(kafka: KafkaSettings) -> None:
    def tideline(*words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "KAFKA_BOOTSTRAP": kafka.bootstrap}
        return subprocess.run(
            [sys.executable, "-m", "jobs", "topics", *words], env=env, capture_output=True, text=True, timeout=60
        )

    assert tideline("apply").returncode == 0
    planned = tideline("plan", "--format", "json")
    assert {row["action"] for row in json.loads(planned.stdout)} == {"keep"}
    grow_topic(kafka, "clicks", 4)
    refused = tideline("apply")
    assert refused.returncode == 1
    assert "4 → 3 would delete records" in " ".join(refused.stderr.split())
    assert "│ clicks" in refused.stdout


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_kafka_python_logs_in(broker: SecuredBroker, kafka: KafkaSettings, mechanism: str) -> None:
    name = f"in_{mechanism.lower()}"
    with admin(kafka) as client:
        client.alter_user_scram_credentials(
            [UserScramCredentialUpsertion(USER, ScramMechanism.SCRAM_SHA_256, PASSWORD, iterations=4096)]
        )
    settings = secured(broker, mechanism)
    provision(settings, topic(name, partitions=1))
    send(settings, name)
    with KafkaConsumer(name, **client_options(settings), group_id=None, auto_offset_reset="earliest") as consumer:
        assert next(consumer).value == b"a record"


def test_a_wrong_password_is_suspected_and_never_shown(broker: SecuredBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.broker.kafka.ADMIN_TIMEOUT_MS", 2000)
    wrong = dataclasses.replace(secured(broker), password="not-the-password")
    with pytest.raises(Refusal, match="if the login is wrong") as refused:
        describe(wrong, ["any"])
    assert "not-the-password" not in str(refused.value)


@pytest.fixture
def modest(broker: SecuredBroker, kafka: KafkaSettings) -> Iterator[KafkaSettings]:
    """The settings of a user without rights. Most topics of the definitions exist."""
    renew_topics(kafka)
    make_work(kafka)
    yield secured(broker, user=MODEST)
    everything = ResourcePatternFilter(ResourceType.ANY, None, ACLResourcePatternType.ANY)
    with admin(kafka) as client:
        client.delete_acls([ACLFilter(f"User:{MODEST}", "*", ACLOperation.ANY, ACLPermissionType.ANY, everything)])


def grant(kafka: KafkaSettings, *granted: Right) -> None:
    acls = [
        ACL(
            f"User:{MODEST}",
            "*",
            ACLOperation[operation],
            ACLPermissionType.ALLOW,
            ResourcePattern(ResourceType.TOPIC, name, ACLResourcePatternType.LITERAL),
        )
        for right in granted
        for name in right.topics
        for operation in right.operations
    ]
    with admin(kafka) as client:
        client.create_acls(acls)


def of(who: str, *, without: str = "") -> list[Right]:
    """The rights that the page grants, if need be without one operation."""
    found = [right for right in rights() if right.who == who]
    assert found
    return [
        dataclasses.replace(right, operations=tuple(one for one in right.operations if one != without))
        for right in found
    ]


def send_records(settings: Settings) -> None:
    traffic.send(settings.kafka, "lines", traffic.records("lines", seed=1, count=3, start_ms=None), rate=0)


def reset_plan(settings: Settings) -> None:
    with admin(settings.kafka) as client:
        reset.plan(settings, client, reset.Request(job="rolling_sum", to=reset.To.LATEST))


def plan_and_publish(settings: Settings) -> None:
    with admin(settings.kafka) as client, broker_clock(client, settings.kafka) as clock:
        lake = PipelineLake(settings.lake_root, PIPELINES["rolling_sum"])
        planning.Planner(lake=lake, client=client, clock=clock).plan("a run")
    assert final_topic.send(settings.kafka, "sums.final", [(b"key", b"a row")]) == 1


def plan_topics(settings: Settings) -> None:
    with admin(settings.kafka) as client:
        topics.require_no_refusal(topics.survey(client, pipelines.topics()))


def apply_topics(settings: Settings) -> None:
    provision(settings.kafka, *pipelines.topics())


def make_work(kafka: KafkaSettings) -> None:
    """A topic is missing, one has too few partitions, one keeps records for too short."""
    with admin(kafka) as client:
        client.delete_topics(["wordcounts", "orders"])
        wait_until(lambda: not {"wordcounts", "orders"} & set(client.list_topics()), "the topics are gone")
    provision(kafka, dataclasses.replace(retained("orders", hours=1), partitions=1))


@pytest.mark.parametrize(
    ("who", "work", "needed"),
    [
        ("generate_demo_traffic", send_records, "WRITE"),
        ("reset_stream", reset_plan, "DESCRIBE"),
        ("recompute_rolling_sum", plan_and_publish, "WRITE"),
        ("tideline topics plan", plan_topics, "DESCRIBE_CONFIGS"),
        ("provision_topics", apply_topics, "CREATE"),
    ],
)
def test_the_rights_of_the_page_are_enough_and_needed(
    kafka: KafkaSettings,
    modest: KafkaSettings,
    tmp_path: Path,
    who: str,
    work: Callable[[Settings], None],
    needed: str,
) -> None:
    settings = dataclasses.replace(Settings.from_env({}), kafka=modest, lake_root=tmp_path)
    grant(kafka, *of(who, without=needed))
    with pytest.raises((Refusal, KafkaError)):
        work(settings)
    grant(kafka, *of(who))

    def works() -> bool:
        try:
            work(settings)
        except (Refusal, KafkaError):
            # A broker applies a new right a moment later.
            return False
        return True

    wait_until(works, f"{who} works with the rights of the page", 20)


def test_configs_that_are_not_shown_are_a_sentence(kafka: KafkaSettings, modest: KafkaSettings) -> None:
    grant(kafka, *of("tideline topics plan", without="DESCRIBE_CONFIGS"))

    def refused() -> str:
        with pytest.raises(Refusal) as refusal:
            plan_topics(dataclasses.replace(Settings.from_env({}), kafka=modest))
        return str(refusal.value)

    # A broker applies a new right a moment later.
    wait_until(lambda: "does not show the configs of" in refused(), "it is told of the right that is missing", 20)


@pytest.mark.spark
def test_spark_logs_in(broker: SecuredBroker, kafka: KafkaSettings) -> None:
    provision(kafka, topic("for_spark"))
    send(kafka, "for_spark")
    # Only the rights that a stream needs on its source.
    (reads, _) = of("stream_rolling_sum")
    grant(kafka, dataclasses.replace(reads, topics=("for_spark",)))
    env = {
        **os.environ,
        **secured(broker, user=MODEST).as_env(),
        "SPARK_MASTER": "local[1]",
        "SPARK_DRIVER_MEMORY": "512m",
    }
    ran = subprocess.run([sys.executable, "-c", _READ], env=env, capture_output=True, text=True, timeout=180)
    assert ran.stdout.split() == ["read:", "1"], ran.stderr[-3000:]
    assert PASSWORD not in ran.stderr


_READ = """
from jobs.broker.kafka import spark_options
from jobs.session import build
from jobs.settings import Settings
settings = Settings.from_env()
records = build(settings, "login").read.format("kafka").options(**spark_options(settings.kafka))
print("read:", records.option("subscribe", "for_spark").load().count())
"""
