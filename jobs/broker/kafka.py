"""Reach Kafka with one `KafkaSettings`, by kafka-python and by Spark, and read the present state of topics."""

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kafka import KafkaAdminClient, TopicPartition
from kafka.admin import OffsetSpec
from kafka.errors import KafkaError, SaslAuthenticationFailedError, UnknownTopicOrPartitionError, for_code
from kafka.net.compat import KafkaNetClient

from jobs.refusal import Refusal
from jobs.settings import KafkaSettings

ADMIN_TIMEOUT_MS = 10_000
_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_LOGIN_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_bootstrap_lock = threading.Lock()

# kafka-python logs every connection at INFO, and the password at DEBUG.
logging.getLogger("kafka").setLevel(logging.WARNING)
# Its selector warns of every pause over 0.1 s. A busy machine has many, and so has a process that builds batches.
logging.getLogger("kafka.net.selector").setLevel(logging.ERROR)


@dataclass(frozen=True, kw_only=True)
class TopicState:
    """A topic at one moment; ``latest`` counts the records of open transactions, too (read_uncommitted)."""

    cluster_id: str
    topic_id: str
    partitions: int
    earliest: dict[int, int]
    latest: dict[int, int]


def client_options(kafka: KafkaSettings) -> dict[str, Any]:
    """The keyword arguments of every kafka-python client."""
    _check(kafka)
    options: dict[str, Any] = {
        "bootstrap_servers": kafka.bootstrap,
        "security_protocol": kafka.security_protocol,
        # By default the next attempt may come as late as half a minute after the broker is back.
        "reconnect_backoff_max_ms": 1000,
    }
    if kafka.security_protocol.startswith("SASL_"):
        options["sasl_mechanism"] = kafka.sasl_mechanism
        options["sasl_plain_username"] = kafka.username
        options["sasl_plain_password"] = kafka.password
    if kafka.security_protocol.endswith("SSL"):
        options["ssl_cafile"] = kafka.ssl_cafile
        options["ssl_certfile"] = kafka.ssl_certfile
        options["ssl_keyfile"] = kafka.ssl_keyfile
        options["ssl_password"] = kafka.ssl_key_password
    return options


def spark_options(kafka: KafkaSettings) -> dict[str, str]:
    """The connection options of Spark's Kafka source and sink. They hold secrets: never log them."""
    _check(kafka)
    options = {
        "kafka.bootstrap.servers": kafka.bootstrap,
        "kafka.security.protocol": kafka.security_protocol,
    }
    if kafka.security_protocol.startswith("SASL_"):
        options["kafka.sasl.mechanism"] = str(kafka.sasl_mechanism)
        options["kafka.sasl.jaas.config"] = _jaas(kafka)
    if kafka.security_protocol.endswith("SSL"):
        options |= _spark_ssl(kafka)
    return options


def _check(kafka: KafkaSettings) -> None:
    """Refuse wrong settings here: the clients would only log an error from inside a connection thread."""
    if kafka.security_protocol not in _PROTOCOLS:
        raise Refusal(f"KAFKA_SECURITY_PROTOCOL={kafka.security_protocol!r} is unknown: use one of {_PROTOCOLS}")
    for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile"):
        path = getattr(kafka, name)
        if path and not os.access(path, os.R_OK):
            raise Refusal(f"KAFKA_{name.upper()}={path!r} cannot be read: correct the path or its permissions")
    if not kafka.security_protocol.startswith("SASL_"):
        return
    if kafka.sasl_mechanism not in _LOGIN_MODULES:
        raise Refusal(f"KAFKA_SASL_MECHANISM={kafka.sasl_mechanism!r}: use one of {tuple(_LOGIN_MODULES)}")
    if kafka.username is None or kafka.password is None:
        raise Refusal(f"{kafka.security_protocol} needs a login: set KAFKA_USERNAME and KAFKA_PASSWORD")


def _jaas(kafka: KafkaSettings) -> str:
    module = _LOGIN_MODULES[str(kafka.sasl_mechanism)]
    return f"{module} required username={_quoted(kafka.username)} password={_quoted(kafka.password)};"


def _quoted(text: str | None) -> str:
    """A JAAS string. Java's StreamTokenizer reads it: it accepts C's escapes, and ends a string at a line break."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"}
    return '"' + "".join(escapes.get(char, char) for char in text or "") + '"'


def _spark_ssl(kafka: KafkaSettings) -> dict[str, str]:
    options = {}
    if kafka.ssl_cafile:
        options["kafka.ssl.truststore.type"] = "PEM"
        options["kafka.ssl.truststore.location"] = kafka.ssl_cafile
    if kafka.ssl_certfile:
        # Given as text, because a PEM key store in a file must be encrypted.
        options["kafka.ssl.keystore.type"] = "PEM"
        options["kafka.ssl.keystore.certificate.chain"] = Path(kafka.ssl_certfile).read_text()
        options["kafka.ssl.keystore.key"] = Path(kafka.ssl_keyfile or kafka.ssl_certfile).read_text()
    if kafka.ssl_key_password:
        options["kafka.ssl.key.password"] = kafka.ssl_key_password
    return options


@contextmanager
def admin(kafka: KafkaSettings) -> Iterator[KafkaAdminClient]:
    """An admin client. A Kafka error within the block becomes a `Refusal` that names the bootstrap address."""
    client = connect(kafka)
    try:
        yield client
    except KafkaError as error:
        raise Refusal(f"Kafka at {kafka.bootstrap}: {error}") from error
    finally:
        client.close()


def connect(kafka: KafkaSettings) -> KafkaAdminClient:
    """An admin client that the caller closes; a `Refusal` says why Kafka does not answer."""
    opened: list[KafkaNetClient] = []

    def open_net(**configs: Any) -> KafkaNetClient:
        opened.append(KafkaNetClient(**configs))
        return opened[-1]

    timeouts = {"bootstrap_timeout_ms": ADMIN_TIMEOUT_MS, "request_timeout_ms": ADMIN_TIMEOUT_MS}
    with hushed() as reasons:
        try:
            return KafkaAdminClient(**client_options(kafka), **timeouts, kafka_client=open_net)
        except KafkaError as error:
            # When the constructor fails, it leaves a thread behind that it has started.
            for net in opened:
                net.close()
            login = (
                "; a broker may also close the connection if the login is wrong"
                if kafka.security_protocol.startswith("SASL_")
                else ""
            )
            raise Refusal(
                f"Kafka does not answer at {kafka.bootstrap} ({reasons.first or error}{login}): "
                "start it, or correct KAFKA_BOOTSTRAP and the security settings"
            ) from error


class _Reasons(logging.Handler):
    """Keeps the exceptions that kafka-python logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the exceptions among the arguments of a message that kafka-python logs."""
        self.seen += [arg for arg in record.args or () if isinstance(arg, BaseException)]

    @property
    def first(self) -> BaseException | None:
        """The most useful exception: a broker may answer a wrong login once, and only hang up on later attempts."""
        denied = [error for error in self.seen if isinstance(error, SaslAuthenticationFailedError)]
        return next(iter(denied + self.seen), None)


@contextmanager
def hushed() -> Iterator[_Reasons]:
    """Collect the reasons of a failure. kafka-python only logs them, about ten lines per attempt, so it is silenced."""
    logger, reasons = logging.getLogger("kafka"), _Reasons()
    with _bootstrap_lock:
        logger.addHandler(reasons)
        logger.propagate = False
        try:
            yield reasons
        finally:
            logger.propagate = True
            logger.removeHandler(reasons)


def describe(kafka: KafkaSettings, topics: Iterable[str]) -> dict[str, TopicState]:
    """The present state of topics; a topic that does not exist is absent."""
    with admin(kafka) as client:
        return states(client, topics)


def states(client: KafkaAdminClient, topics: Iterable[str]) -> dict[str, TopicState]:
    """`describe` on a client that is already open."""
    described = _existing(client, topics)
    partitions = _partitions(described)
    cluster_id = client.describe_cluster()["cluster_id"]
    earliest = client.list_partition_offsets(dict.fromkeys(partitions, OffsetSpec.EARLIEST))
    latest = client.list_partition_offsets(dict.fromkeys(partitions, OffsetSpec.LATEST))
    return {
        name: TopicState(
            cluster_id=cluster_id,
            topic_id=_topic_id(topic),
            partitions=len(topic["partitions"]),
            earliest={at.partition: earliest[at].offset for at in partitions if at.topic == name},
            latest={at.partition: latest[at].offset for at in partitions if at.topic == name},
        )
        for name, topic in described.items()
    }


def require(client: KafkaAdminClient, topics: Iterable[str]) -> dict[str, TopicState]:
    """`states` of the topics that a job needs; a `Refusal` names those that do not exist."""
    wanted = set(topics)
    found = states(client, wanted)
    missing = sorted(wanted - set(found))
    if missing:
        raise Refusal(f"no topic {', '.join(missing)}: run the DAG provision_topics or `tideline topics apply`")
    return found


def committed_ends(client: KafkaAdminClient, topics: Iterable[str]) -> dict[str, dict[int, int]]:
    """The present end of each partition of the topics, for a reader of committed records.

    It lies before the first open transaction. `TopicState.latest` counts the records of open transactions, too.
    """
    partitions = _partitions(_existing(client, topics))
    ends = client.list_partition_offsets(dict.fromkeys(partitions, OffsetSpec.LATEST), isolation_level="read_committed")
    return {name: {at.partition: ends[at].offset for at in partitions if at.topic == name} for name in topics}


def topic_ids(client: KafkaAdminClient, topics: Iterable[str]) -> dict[str, str]:
    """The ids of the topics that exist, by one metadata request. After a `KafkaError` the caller may try again."""
    return {name: _topic_id(topic) for name, topic in _existing(client, topics).items()}


def _existing(client: KafkaAdminClient, topics: Iterable[str]) -> dict[str, dict[str, Any]]:
    described = {}
    for topic in client.describe_topics(list(topics)):
        error = for_code(topic["error_code"])
        if error is UnknownTopicOrPartitionError:
            continue
        if topic["error_code"]:
            raise error(f"topic {topic['name']!r} cannot be described")
        described[topic["name"]] = topic
    return described


def _partitions(described: dict[str, dict[str, Any]]) -> list[TopicPartition]:
    return [
        TopicPartition(name, partition["partition_index"])
        for name, topic in described.items()
        for partition in topic["partitions"]
    ]


def _topic_id(topic: dict[str, Any]) -> str:
    if topic["topic_id"] is None:
        raise Refusal(
            f"topic {topic['name']!r} has no id, by which Tideline recognizes a re-created topic: use Kafka ≥ 2.8"
        )
    return str(topic["topic_id"])
