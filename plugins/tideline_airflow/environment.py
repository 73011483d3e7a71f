"""The environment of the processes that tasks start."""

import os

from tideline_airflow.hooks.kafka import KafkaHook


def of_child(kafka_conn_id: str = KafkaHook.default_conn_name) -> dict[str, str]:
    """That of the task without what is Airflow's, and with Kafka as the connection says it.

    Airflow has its name in every setting, secret, connection and variable, so one rule leaves out all of them. What
    remains may not be listed: a cluster has variables of its own, such as `HADOOP_CONF_DIR` or `KUBECONFIG`.
    """
    own = {name: value for name, value in os.environ.items() if "AIRFLOW" not in name.upper()}
    return {**own, **KafkaHook(kafka_conn_id).environment()}
