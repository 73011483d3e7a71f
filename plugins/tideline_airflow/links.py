"""The buttons on a task's page in the Airflow UI, and the folder of the driver logs behind one of them."""

from pathlib import Path
from typing import Any
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink, conf

from jobs.pipelines.layout import recompute_job_of
from jobs.upkeep.logs import DRIVERS

CONSOLE = "/tideline"


class StreamLink(BaseOperatorLink):
    """The state of the stream: its last progress, its epochs and how they ended."""

    name = "Stream"
    page = ""

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """The page of the stream that this operator runs, whichever driver holds the lease by then."""
        return address(f"streams/{operator.dag_id}{self.page}")


class DriverLogLink(StreamLink):
    """The log of the newest driver."""

    name = "Driver's log"
    page = "/log"


class SparkUiLink(StreamLink):
    """The Spark UI of the driver that runs."""

    name = "Spark UI"
    page = "/spark"


class SlicesLink(BaseOperatorLink):
    """The newest slices of the pipeline: states, versions, the tide line."""

    name = "Slices"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """The page of the pipeline that this operator is about."""
        return address(f"slices/{recompute_job_of(operator.pipeline)}")


class DataDocsLink(BaseOperatorLink):
    """The results of Great Expectations in this run."""

    name = "Data Docs"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """The page of this run; it exists after the audit or check."""
        return self.address(ti_key.dag_id, ti_key.run_id)

    @staticmethod
    def address(dag_id: str, run_id: str) -> str:
        """The page of a run."""
        return address(f"quality/{dag_id}/{quote(run_id, safe='')}.html")


def address(path: str) -> str:
    """The address of a page of Tideline."""
    return page(f"{CONSOLE}/{path}")


def page(path: str) -> str:
    """The address of a page of Airflow. The path begins with a slash."""
    return f"{conf.get('api', 'base_url', fallback='').rstrip('/')}{path}"


def driver_logs(job: str) -> Path:
    """Where the logs of a job's drivers are, on the machine where its tasks run."""
    return Path(conf.get("logging", "base_log_folder")) / DRIVERS / job
