"""Registration only: what is registered lives in the package beside it; the connection type comes as a provider."""

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
    """The pages. Every process of Airflow reads this file, and only the API server needs what they import."""
    from tideline_airflow.console.app import app

    await app(scope, receive, send)


class TidelinePlugin(AirflowPlugin):
    """Tideline in the Airflow UI."""

    name = "tideline"
    listeners = (listeners,)
    priority_weight_strategies = (FirstCome,)
    fastapi_apps = ({"app": console, "url_prefix": CONSOLE, "name": "Tideline"},)
