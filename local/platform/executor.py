"""Airflow's LocalExecutor as one machine needs it: no log server, warm workers, and a database that does not grow."""

import importlib
import logging
import warnings
from typing import Any

from airflow.executors.local_executor import LocalExecutor as AirflowLocalExecutor

from local.platform.database import Cleaning

# Every task is a fork of a worker. If each task of a recompute imported these modules itself, it would take seconds.
# They are imported once here, and shared.
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


# The class keeps this name, because Airflow recognises by it that this is not a production setup.
class LocalExecutor(AirflowLocalExecutor):
    """Runs tasks as processes of the scheduler. Their logs are read from the folder, also while they run."""

    serve_logs = False

    def start(self) -> None:
        """Import the modules before the workers are forked."""
        # Some modules log unimportant messages at import.
        logging.getLogger("great_expectations").setLevel(logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in WARM:
                importlib.import_module(module)
        super().start()
        self._cleaning = Cleaning()

    def sync(self) -> None:
        """Start the cleaning when it is due. The scheduler calls this about every second in its own process.

        That process, unlike tasks, may use the database.
        """
        super().sync()
        self._cleaning.look()

    def get_task_log(self, ti: Any, try_number: int) -> tuple[list[str], list[str]]:
        """Add nothing to the log file. A source is named, since Airflow would otherwise ask the log server."""
        return ["this machine"], []
