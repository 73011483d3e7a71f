"""Kafka from an Airflow connection of type `tideline_kafka`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook, Connection

from jobs.refusal import Refusal
from jobs.settings import KafkaSettings

if TYPE_CHECKING:
    from kafka import KafkaAdminClient

# As librdkafka writes them, so that the extra of a `kafka` connection can be taken over as it is.
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
    """Kafka as a connection describes it: for kafka-python here, as environment for the processes that tasks start."""

    conn_name_attr = "kafka_conn_id"
    default_conn_name = "tideline_kafka"
    conn_type = "tideline_kafka"
    hook_name = "Kafka (Tideline)"

    def __init__(self, kafka_conn_id: str = default_conn_name) -> None:
        """Nothing is looked up before it is asked for."""
        super().__init__()
        self.kafka_conn_id = kafka_conn_id

    def settings(self) -> KafkaSettings:
        """What the connection says; its fields win over dotted keys of its extra."""
        return settings_of(self.get_connection(self.kafka_conn_id))

    def get_conn(self) -> "KafkaAdminClient":
        """An admin client; close it."""
        from jobs.broker import kafka

        return kafka.connect(self.settings())

    def environment(self) -> dict[str, str]:
        """The settings for a child process. Names it does not set are empty, so that nothing else fills them in."""
        kafka = self.settings()
        return {f"KAFKA_{name.upper()}": "" for name in vars(kafka)} | kafka.as_env()

    def test_connection(self) -> tuple[bool, str]:
        """Ask the cluster who it is."""
        from jobs.broker import kafka

        try:
            with kafka.admin(self.settings()) as client:
                cluster = client.describe_cluster()
        except Refusal as refusal:
            return False, str(refusal)
        return True, f"Kafka cluster {cluster['cluster_id']}, brokers: {len(cluster['brokers'])}"


def settings_of(connection: Connection) -> KafkaSettings:
    """A connection as settings: fields of its form, else dotted keys of its extra, else the defaults."""
    extra: Mapping[str, Any] = connection.extra_dejson
    dotted = {field: extra[key] for key, field in _DOTTED.items() if extra.get(key)}
    fields = {name: extra[name] for name in KafkaSettings.__annotations__ if extra.get(name)}
    own = {"bootstrap": _bootstrap(connection), "username": connection.login, "password": connection.password}
    return KafkaSettings(**{**dotted, **fields, **{name: value for name, value in own.items() if value}})


def _bootstrap(connection: Connection) -> str | None:
    if connection.host and connection.port:
        return f"{connection.host}:{connection.port}"
    return connection.host
