"""Requests to the pages of the console, over HTTP. Airflow decides whether a user may see a page."""

import asyncio
from collections.abc import Sequence

import httpx
from fastapi.params import Depends

from tideline_airflow.console import slices, streams
from tideline_airflow.console.app import app

ROUTES = [*streams.router.routes, *slices.router.routes]


def agree(asked: Sequence[Depends]) -> None:
    """Answer these questions of access with yes, without asking Airflow."""
    assert asked
    for question in asked:
        assert question.dependency
        app.dependency_overrides[question.dependency] = lambda: None


def ask(path: str) -> httpx.Response:
    """Request a page."""

    async def answer() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://airflow") as client:
            return await client.get(path)

    return asyncio.run(answer())
