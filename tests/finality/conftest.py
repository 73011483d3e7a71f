"""A lake to account for."""

from dataclasses import replace
from pathlib import Path

import pytest

from jobs.settings import Settings
from tests.finality.accounts import Made


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(replace(Settings.from_env({}), lake_root=tmp_path / "lake"))
