"""Where a task of Tideline leads to: buttons on its page in the Airflow UI, and the logs behind one of them."""

from pathlib import Path
from typing import Any

from airflow.sdk import BaseOperatorLink, conf

CONSOLE = "/tideline"


class StreamLink(BaseOperatorLink):
    """How the stream does: its last progress, its epochs and how they ended."""

    name = "Stream"
    page = ""

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """The page of the stream that this operator runs; it is found there, whoever holds the lease by then."""
        return f"{conf.get('api', 'base_url', fallback='').rstrip('/')}{CONSOLE}/streams/{operator.dag_id}{self.page}"


class DriverLogLink(StreamLink):
    """What the newest driver says."""

    name = "Driver's log"
    page = "/log"


class SparkUiLink(StreamLink):
    """The Spark UI of the driver that runs."""

    name = "Spark UI"
    page = "/spark"


def driver_logs(job: str) -> Path:
    """Where the logs of a job's drivers are, on the machine where its tasks run."""
    return Path(conf.get("logging", "base_log_folder")) / "drivers" / job
