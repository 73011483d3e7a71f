"""What the simulation needs beside its worlds."""

import json
from pathlib import Path

import pytest

from jobs.finality import rollback
from jobs.lake.slices import Header


@pytest.fixture
def staged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage rolled-back rows in the form that the model reads."""

    def stage_again(stage: Path, header: Header, rows: object) -> tuple[Path, ...]:
        file = stage / f"{header.slice}-{header.version}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        (row,) = rows.to_pylist() or [{"events": 0}]  # type: ignore[attr-defined]
        file.write_text(json.dumps({"events": row["events"]}))
        return (file,)

    monkeypatch.setattr(rollback, "_stage_again", stage_again)
