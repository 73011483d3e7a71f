"""Where a live table lies, and how long it keeps the files that it has replaced."""

from pathlib import Path

import pytest

from jobs.lake import stream_tables


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "live" / "rolling_sum"


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of streams keep replaced files for no time."""
    at_once = {**stream_tables._kept(), "delta.deletedFileRetentionDuration": "interval 0 seconds"}
    monkeypatch.setattr(stream_tables, "_kept", lambda: at_once)
