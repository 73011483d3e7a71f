"""How Airflow reaches Kafka, Spark and the lake."""

from typing import Any

_TEXT = {"type": ["string", "null"]}


def get_provider_info() -> dict[str, Any]:
    """Tideline as a provider of Airflow: connection types `tideline_kafka` and `tideline_airflow` with their forms."""
    operators = ["account", "audit", "batch", "check", "control", "plan", "publish"]
    operators += ["recompute", "slices", "streaming", "topics", "traffic", "upkeep"]
    return {
        "package-name": "tideline",
        "name": "Tideline",
        "description": "Streaming numbers you can trust: Kafka, Spark and the lake, run by Airflow.",
        "integrations": [
            {"integration-name": "Tideline", "external-doc-url": "https://kafka.apache.org/", "tags": ["software"]}
        ],
        "hooks": [
            {
                "integration-name": "Tideline",
                "python-modules": ["tideline_airflow.hooks.airflow", "tideline_airflow.hooks.kafka"],
            }
        ],
        "operators": [
            {
                "integration-name": "Tideline",
                "python-modules": [f"tideline_airflow.operators.{name}" for name in operators],
            }
        ],
        "triggers": [
            {
                "integration-name": "Tideline",
                "python-modules": ["tideline_airflow.triggers.room", "tideline_airflow.triggers.streaming"],
            }
        ],
        "connection-types": [
            {
                "hook-class-name": "tideline_airflow.hooks.kafka.KafkaHook",
                "hook-name": "Kafka (Tideline)",
                "connection-type": "tideline_kafka",
                "ui-field-behaviour": {
                    "hidden-fields": ["schema", "port"],
                    "relabeling": {"host": "Bootstrap servers", "login": "SASL username", "password": "SASL password"},
                    "placeholders": {"host": "broker-1:9092,broker-2:9092"},
                },
                "conn-fields": {
                    "security_protocol": {
                        "label": "Security protocol",
                        "description": "PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL",
                        "schema": {
                            "type": ["string", "null"],
                            "enum": ["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"],
                            "default": "PLAINTEXT",
                        },
                    },
                    "sasl_mechanism": {
                        "label": "SASL mechanism",
                        "description": "PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512; needed with SASL_*",
                        "schema": {**_TEXT, "enum": ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]},
                    },
                    "ssl_cafile": {
                        "label": "CA certificates",
                        "description": "Path of a PEM file where tasks run; if empty, the certificates of the system",
                        "schema": _TEXT,
                    },
                    "ssl_certfile": {
                        "label": "Client certificate",
                        "description": "Path of a PEM file; needed if the brokers ask clients for a certificate",
                        "schema": _TEXT,
                    },
                    "ssl_keyfile": {
                        "label": "Client key",
                        "description": "Path of a PEM file (PKCS#8); if empty, the certificate's file has the key",
                        "schema": _TEXT,
                    },
                    "ssl_key_password": {
                        "label": "Client key's password",
                        "schema": {"type": ["string", "null"], "format": "password"},
                    },
                },
            },
            {
                "hook-class-name": "tideline_airflow.hooks.airflow.AirflowHook",
                "hook-name": "Airflow (Tideline)",
                "connection-type": "tideline_airflow",
                "ui-field-behaviour": {
                    "hidden-fields": ["schema", "port", "extra"],
                    "relabeling": {"host": "Address of the API server"},
                    "placeholders": {"host": "http://airflow.example:8080"},
                },
            },
        ],
    }
