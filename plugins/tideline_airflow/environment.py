"""The environment of the processes that tasks start."""

import os

from tideline_airflow.hooks.kafka import KafkaHook


def of_child() -> dict[str, str]:
    """The task's environment without Airflow's variables, plus Kafka's settings from the connection.

    Airflow's settings, secrets, connections and variables all have AIRFLOW in their names, so one rule removes them.
    A list of variables to keep would not work: a cluster has its own, such as `HADOOP_CONF_DIR` or `KUBECONFIG`.
    """
    own = {name: value for name, value in os.environ.items() if "AIRFLOW" not in name.upper()}
    return {**own, **KafkaHook().environment()}
