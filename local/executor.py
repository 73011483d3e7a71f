"""Airflow's LocalExecutor without its log server, which would listen on every address of the machine."""

from typing import Any

from airflow.executors.local_executor import LocalExecutor as AirflowLocalExecutor


# The name stays: Airflow tells by it that this is no production.
class LocalExecutor(AirflowLocalExecutor):
    """Runs tasks as processes of the scheduler; their logs are read from the folder, also while they run."""

    serve_logs = False

    def get_task_log(self, ti: Any, try_number: int) -> tuple[list[str], list[str]]:
        """Nothing beyond the file; a source is named, or Airflow would ask the log server."""
        return ["this machine"], []
