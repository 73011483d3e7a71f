"""Kafka from an Airflow connection of type `tideline_kafka`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook, Connection

from jobs.refusal import Refusal
from jobs.settings import KafkaSettings

if TYPE_CHECKING:
    from kafka import KafkaAdminClient

# librdkafka's names of settings, so that the extra of an existing `kafka` connection can be copied unchanged.
_DOTTED = {
    "bootstrap.servers": "bootstrap",
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "username",
    "sasl.password": "password",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_key_password",
}


class KafkaHook(BaseHook):
    """Kafka's settings from a connection: for kafka-python in this process, as environment for child processes."""

    conn_name_attr = "kafka_conn_id"
    default_conn_name = "tideline_kafka"
    conn_type = "tideline_kafka"
    hook_name = "Kafka (Tideline)"

    def __init__(self, kafka_conn_id: str = default_conn_name) -> None:
        """The connection is looked up on first use."""
        super().__init__()
        self.kafka_conn_id = kafka_conn_id

    def settings(self) -> KafkaSettings:
        """The connection's settings. A field of its form wins over a dotted key of its extra."""
        return settings_of(self.get_connection(self.kafka_conn_id))

    def get_conn(self) -> "KafkaAdminClient":
        """An admin client. The caller closes it."""
        from jobs.broker import kafka

        return kafka.connect(self.settings())

    def environment(self) -> dict[str, str]:
        """The settings for a child process. Settings without a value are empty, so that no inherited value applies."""
        kafka = self.settings()
        return {f"KAFKA_{name.upper()}": "" for name in vars(kafka)} | kafka.as_env()

    def test_connection(self) -> tuple[bool, str]:
        """Ask the cluster for its id and its brokers."""
        from jobs.broker import kafka

        try:
            with kafka.admin(self.settings()) as client:
                cluster = client.describe_cluster()
        except Refusal as refusal:
            return False, str(refusal)
        return True, f"Kafka cluster {cluster['cluster_id']}, brokers: {len(cluster['brokers'])}"


def settings_of(connection: Connection) -> KafkaSettings:
    """A connection's settings: from the fields of its form, else the dotted keys of its extra, else the defaults."""
    extra: Mapping[str, Any] = connection.extra_dejson
    dotted = {field: extra[key] for key, field in _DOTTED.items() if extra.get(key)}
    fields = {name: extra[name] for name in KafkaSettings.__annotations__ if extra.get(name)}
    own = {"bootstrap": _bootstrap(connection), "username": connection.login, "password": connection.password}
    return KafkaSettings(**{**dotted, **fields, **{name: value for name, value in own.items() if value}})


def _bootstrap(connection: Connection) -> str | None:
    if connection.host and connection.port:
        return f"{connection.host}:{connection.port}"
    return connection.host
