"""A folder for Airflow, and what the tests of pages need."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Airflow makes its home folder when it is imported.
os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="airflow-home-")


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lake that does not exist yet."""
    monkeypatch.setenv("LAKE_ROOT", str(tmp_path / "lake"))
    return tmp_path / "lake"


@pytest.fixture
def agreed() -> Iterator[None]:
    """Airflow lets this user see every page. Each page asks it first, some of them more than once."""
    from tests.plugins.console_pages import ROUTES, agree
    from tideline_airflow.console.app import app

    for route in ROUTES:
        agree(route.dependencies)
    yield
    app.dependency_overrides.clear()
