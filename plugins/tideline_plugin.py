"""Registration only: what it registers lives in the package beside it."""

from airflow.plugins_manager import AirflowPlugin


class TidelinePlugin(AirflowPlugin):
    """The hook and its connection type come through the provider entry point; pages and links will come here."""

    name = "tideline"
