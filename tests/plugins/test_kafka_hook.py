"""A connection of type `tideline_kafka` as settings, and the form that Airflow shows for it."""

import gc
import json
from importlib.metadata import entry_points
from importlib.resources import files

import jsonschema
import pytest
from airflow.sdk import Connection
from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime

from jobs.settings import KafkaSettings
from local.platform.ports import free_port
from tideline_airflow import get_provider_info
from tideline_airflow.hooks.kafka import KafkaHook, settings_of

PASSWORD = "only-in-the-broker"


def connection(**fields: object) -> Connection:
    extra = json.dumps(fields.pop("extra", {}))
    return Connection(conn_id="k", conn_type="tideline_kafka", extra=extra, **fields)


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (connection(), KafkaSettings()),
        (connection(host="a:1,b:2"), KafkaSettings(bootstrap="a:1,b:2")),
        (connection(host="a", port=1), KafkaSettings(bootstrap="a:1")),
        (
            connection(
                host="a:1",
                login="u",
                password=PASSWORD,
                extra={"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "ssl_cafile": "/ca", "other": 1},
            ),
            KafkaSettings(
                bootstrap="a:1",
                security_protocol="SASL_SSL",
                sasl_mechanism="PLAIN",
                username="u",
                password=PASSWORD,
                ssl_cafile="/ca",
            ),
        ),
        (
            connection(
                extra={
                    "bootstrap.servers": "a:1",
                    "security.protocol": "SASL_SSL",
                    "sasl.mechanisms": "SCRAM-SHA-512",
                    "sasl.username": "u",
                    "sasl.password": PASSWORD,
                    "ssl.ca.location": "/ca",
                    "ssl.certificate.location": "/cert",
                    "ssl.key.location": "/key",
                    "ssl.key.password": PASSWORD,
                    "group.id": "ignored",
                }
            ),
            KafkaSettings(
                bootstrap="a:1",
                security_protocol="SASL_SSL",
                sasl_mechanism="SCRAM-SHA-512",
                username="u",
                password=PASSWORD,
                ssl_cafile="/ca",
                ssl_certfile="/cert",
                ssl_keyfile="/key",
                ssl_key_password=PASSWORD,
            ),
        ),
        (
            connection(host="new:1", extra={"bootstrap.servers": "old:1", "security.protocol": "SSL"}),
            KafkaSettings(bootstrap="new:1", security_protocol="SSL"),
        ),
        (
            connection(extra={"security_protocol": "", "ssl_cafile": None}),
            KafkaSettings(),
        ),
    ],
)
def test_a_connection_as_settings(given: Connection, settings: KafkaSettings) -> None:
    assert settings_of(given) == settings


def use(monkeypatch: pytest.MonkeyPatch, **fields: object) -> KafkaHook:
    monkeypatch.setenv("AIRFLOW_CONN_TIDELINE_KAFKA", json.dumps({"conn_type": "tideline_kafka", **fields}))
    return KafkaHook()


def test_a_child_process_sees_this_connection_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = use(monkeypatch, host="a:1", login="u", password=PASSWORD, extra={"security_protocol": "SASL_SSL"})
    inherited = {"KAFKA_SSL_CAFILE": "/of/another/cluster", "KAFKA_BOOTSTRAP": "b:2"}
    assert KafkaSettings.from_env({**inherited, **hook.environment()}) == hook.settings()


def test_no_secret_in_a_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = use(monkeypatch, login="u", password=PASSWORD, extra={"ssl.key.password": PASSWORD})
    assert hook.settings().password == hook.settings().ssl_key_password == PASSWORD
    assert PASSWORD not in f"{hook!r} {hook.settings()!r} {hook.settings()}"


# kafka-python leaves a refused socket to the garbage collector, which may run in another test.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")
def test_the_test_button_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.broker.kafka.ADMIN_TIMEOUT_MS", 300)
    bootstrap = f"127.0.0.1:{free_port()}"
    worked, message = use(monkeypatch, host=bootstrap).test_connection()
    assert not worked
    assert f"Kafka does not answer at {bootstrap}" in message
    gc.collect()


def test_airflow_finds_the_provider_and_its_connection_type() -> None:
    (entry,) = [entry for entry in entry_points(group="apache_airflow_provider") if entry.dist.name == "tideline"]
    assert entry.load() is get_provider_info
    hook = ProvidersManagerTaskRuntime().hooks["tideline_kafka"]
    assert (hook.hook_name, hook.hook_class_name) == (KafkaHook.hook_name, "tideline_airflow.hooks.kafka.KafkaHook")


def test_the_form_asks_for_every_setting_and_hides_the_secret() -> None:
    info = get_provider_info()
    schema = json.loads((files("airflow") / "provider.yaml.schema.json").read_text())
    jsonschema.validate(info["connection-types"], schema["properties"]["connection-types"])
    form = info["connection-types"][0]["conn-fields"]
    assert set(form) == set(KafkaSettings.__annotations__) - {"bootstrap", "username", "password"}
    assert {name for name, field in form.items() if field["schema"].get("format") == "password"} == {"ssl_key_password"}
