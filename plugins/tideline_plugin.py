"""Registration only: what is registered lives in the package beside it; the connection type comes as a provider."""

from airflow.plugins_manager import AirflowPlugin

from tideline_airflow import listeners


class TidelinePlugin(AirflowPlugin):
    """Tideline in the Airflow UI."""

    name = "tideline"
    listeners = (listeners,)
