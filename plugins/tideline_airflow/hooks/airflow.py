"""Airflow's own API from an Airflow connection. Some actions of tasks need it, such as to pause a DAG."""

from airflow.sdk import BaseHook

from jobs.airflow_api.client import AirflowApi
from jobs.refusal import Refusal


class AirflowHook(BaseHook):
    """The API server as a connection of type `tideline_airflow` describes it: address, login, password."""

    conn_name_attr = "airflow_conn_id"
    default_conn_name = "tideline_airflow"
    conn_type = "tideline_airflow"
    hook_name = "Airflow (Tideline)"

    def __init__(self, airflow_conn_id: str = default_conn_name) -> None:
        """The connection is looked up on first use."""
        super().__init__()
        self.airflow_conn_id = airflow_conn_id

    def get_conn(self) -> AirflowApi:
        """A client; use it as a context manager."""
        connection = self.get_connection(self.airflow_conn_id)
        if not (connection.host and connection.login and connection.password):
            raise Refusal(f"connection {self.airflow_conn_id!r} needs the API server's address, a login and a password")
        return AirflowApi(url=connection.host, username=connection.login, password=connection.password)

    def test_connection(self) -> tuple[bool, str]:
        """Log in, and count the DAGs."""
        try:
            with self.get_conn() as api:
                return True, f"logged in; DAGs: {len(api.dags())}"
        except Refusal as refusal:
            return False, str(refusal)
