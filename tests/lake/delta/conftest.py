"""How long the tables of these tests keep the files that they have replaced."""

import pytest

from jobs.lake import stream_tables


@pytest.fixture(autouse=True)
def kept_as_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is opened again keeps its properties. The product would set those of the settings."""
    monkeypatch.setattr(stream_tables, "_kept", dict)
