"""Register listeners, weight rule and pages of `tideline_airflow`. The connection types come as a provider."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from airflow.plugins_manager import AirflowPlugin

from tideline_airflow import listeners
from tideline_airflow.first_come import FirstCome
from tideline_airflow.links import CONSOLE

Message = MutableMapping[str, Any]


async def console(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """Serve the pages. They are imported on the first request, because only the API server needs them."""
    from tideline_airflow.console.app import app

    await app(scope, receive, send)


class TidelinePlugin(AirflowPlugin):
    """Tideline in the Airflow UI."""

    name = "tideline"
    listeners = (listeners,)
    priority_weight_strategies = (FirstCome,)
    fastapi_apps = ({"app": console, "url_prefix": CONSOLE, "name": "Tideline"},)
