"""Airflow's LocalExecutor as one machine needs it: no log server, warm workers, and a database that does not grow."""

import importlib
import logging
import warnings
from typing import Any

from airflow.executors.local_executor import LocalExecutor as AirflowLocalExecutor

from local.platform.database import Cleaning

# Every task is a fork of a worker. What these import costs each task of a recompute seconds if it has to do so itself;
# here it is done once, and shared.
WARM = (
    "airflow.sdk.execution_time.task_runner",
    "jobs.finality.planning",
    "jobs.finality.publishing",
    "jobs.finality.auditing",
    "jobs.query.lake",
    "great_expectations",
    "great_expectations.expectations",
    "great_expectations.render.renderer.page_renderer",
    "great_expectations.render.view.view",
)


# The name stays: Airflow tells by it that this is no production.
class LocalExecutor(AirflowLocalExecutor):
    """Runs tasks as processes of the scheduler; their logs are read from the folder, also while they run."""

    serve_logs = False

    def start(self) -> None:
        """Import before the workers are forked."""
        # Some of them say at import what nobody needs to know.
        logging.getLogger("great_expectations").setLevel(logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in WARM:
                importlib.import_module(module)
        super().start()
        self._cleaning = Cleaning()

    def sync(self) -> None:
        """Called by the scheduler every second or so, here in its own process, which may use the database."""
        super().sync()
        self._cleaning.look()

    def get_task_log(self, ti: Any, try_number: int) -> tuple[list[str], list[str]]:
        """Nothing beyond the file; a source is named, or Airflow would ask the log server."""
        return ["this machine"], []
