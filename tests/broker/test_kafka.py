"""How settings become client options, and the text of a refusal."""

import gc
import logging
import threading
from pathlib import Path

import pytest

from jobs.broker import kafka
from jobs.broker.kafka import admin, client_options, spark_options
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings
from local.platform.ports import free_port

SASL = KafkaSettings(
    bootstrap="b:1", security_protocol="SASL_SSL", sasl_mechanism="PLAIN", username="u", password="p", ssl_cafile=None
)


def test_plaintext_says_nothing_of_security() -> None:
    settings = KafkaSettings(bootstrap="b:1", username="unused", password="unused")
    options = {"bootstrap_servers": "b:1", "security_protocol": "PLAINTEXT", "reconnect_backoff_max_ms": 1000}
    assert client_options(settings) == options
    assert spark_options(settings) == {"kafka.bootstrap.servers": "b:1", "kafka.security.protocol": "PLAINTEXT"}


@pytest.mark.parametrize(
    ("mechanism", "module"),
    [
        ("PLAIN", "org.apache.kafka.common.security.plain.PlainLoginModule"),
        ("SCRAM-SHA-256", "org.apache.kafka.common.security.scram.ScramLoginModule"),
        ("SCRAM-SHA-512", "org.apache.kafka.common.security.scram.ScramLoginModule"),
    ],
)
def test_each_mechanism_has_its_login_module(mechanism: str, module: str) -> None:
    settings = KafkaSettings(security_protocol="SASL_PLAINTEXT", sasl_mechanism=mechanism, username="u", password="p")
    assert spark_options(settings)["kafka.sasl.jaas.config"] == f'{module} required username="u" password="p";'
    assert spark_options(settings)["kafka.sasl.mechanism"] == mechanism
    assert client_options(settings)["sasl_mechanism"] == mechanism


@pytest.mark.parametrize(
    ("password", "quoted"),
    [
        ('a"b', r'"a\"b"'),
        ("a\\b", r'"a\\b"'),
        ("a;b='c'", "\"a;b='c'\""),
        ("a\nb\rc", r'"a\nb\rc"'),
        ('\\"', r'"\\\""'),
    ],
)
def test_a_password_cannot_break_out_of_its_quotes(password: str, quoted: str) -> None:
    settings = KafkaSettings(
        security_protocol="SASL_PLAINTEXT", sasl_mechanism="PLAIN", username="u", password=password
    )
    assert spark_options(settings)["kafka.sasl.jaas.config"].endswith(f" password={quoted};")


def test_certificates_reach_both_clients(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem")}
    for name, file in files.items():
        file.write_text(f"the {name}")
    settings = KafkaSettings(
        security_protocol="SSL",
        ssl_cafile=str(files["ca.pem"]),
        ssl_certfile=str(files["cert.pem"]),
        ssl_keyfile=str(files["key.pem"]),
        ssl_key_password="secret",
    )
    assert client_options(settings)["ssl_password"] == "secret"
    options = spark_options(settings)
    assert options["kafka.ssl.truststore.location"] == str(files["ca.pem"])
    assert options["kafka.ssl.keystore.certificate.chain"] == "the cert.pem"
    assert options["kafka.ssl.keystore.key"] == "the key.pem"
    assert options["kafka.ssl.key.password"] == "secret"


def test_the_key_may_lie_in_the_certificates_file(tmp_path: Path) -> None:
    (tmp_path / "both.pem").write_text("both")
    settings = KafkaSettings(security_protocol="SSL", ssl_certfile=str(tmp_path / "both.pem"))
    assert spark_options(settings)["kafka.ssl.keystore.key"] == "both"


@pytest.mark.parametrize("options", [client_options, spark_options])
@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (KafkaSettings(security_protocol="TLS"), "KAFKA_SECURITY_PROTOCOL='TLS'"),
        (KafkaSettings(security_protocol="SASL_SSL"), "KAFKA_SASL_MECHANISM=None"),
        (KafkaSettings(security_protocol="SASL_SSL", sasl_mechanism="GSSAPI"), "KAFKA_SASL_MECHANISM='GSSAPI'"),
        (KafkaSettings(security_protocol="SASL_SSL", sasl_mechanism="PLAIN", username="u"), "KAFKA_PASSWORD"),
        (KafkaSettings(security_protocol="SSL", ssl_cafile="/nowhere/ca.pem"), "KAFKA_SSL_CAFILE='/nowhere/ca.pem'"),
    ],
)
def test_impossible_settings_are_refused_by_name(options, settings: KafkaSettings, names: str) -> None:
    with pytest.raises(Refusal, match="KAFKA_") as refused:
        options(settings)
    assert names in str(refused.value)


# kafka-python leaves a refused socket to the garbage collector, which may run in another test.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")
def test_an_absent_broker_is_one_sentence_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kafka, "ADMIN_TIMEOUT_MS", 300)
    bootstrap = f"127.0.0.1:{free_port()}"
    before = set(threading.enumerate())
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(Refusal, match=f"Kafka does not answer at {bootstrap}.*ECONNREFUSED.*start it"),
        admin(KafkaSettings(bootstrap=bootstrap)),
    ):
        pytest.fail("nobody answers")
    assert set(threading.enumerate()) <= before
    assert not caplog.records
    assert logging.getLogger("kafka").propagate
    gc.collect()
