"""Airflow's secrets survive a power cut, and are never replaced beside a database that was made with them."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.refusal import Refusal
from local.platform.airflow import Airflow
from local.platform.settings import StackSettings
from tests.judges.power_cut import Cut, watched


def airflow(home: Path) -> Airflow:
    unused: Any = None
    return Airflow(settings=StackSettings.from_env({"TIDELINE_HOME": str(home)}), java=unused)


def test_they_are_drawn_once_and_a_power_cut_does_not_change_them(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with watched(home) as disk:
        drawn = airflow(home)._secrets()
        disk.done("drawn")
    assert sorted(drawn) == ["fernet_key", "jwt_secret", "password", "secret_key"]
    assert airflow(home)._secrets() == drawn
    ways = (Cut.leave_what_was_durable, Cut.leave_half_of_the_rest, Cut.leave_half_of_what_was_new)
    for number, (cut, leave) in enumerate((cut, leave) for cut in disk.cuts for leave in ways):
        left = tmp_path / f"left-{number}"
        leave(cut, left)
        again = airflow(left)._secrets()
        assert again.keys() == drawn.keys(), "a start that was cut off draws them again"
        assert again == drawn or not cut.reported


@pytest.mark.parametrize("content", ["", "\0" * 200, '{"fernet_key": "dG9', None])
def test_secrets_that_are_lost_are_not_replaced_beside_a_database(content: str | None, tmp_path: Path) -> None:
    """With a new key, Airflow could not read what it has encrypted."""
    first = airflow(tmp_path)
    first._secrets()
    path = tmp_path / "airflow" / "secrets.json"
    first.database.touch()
    path.unlink() if content is None else path.write_text(content)
    for ask in (airflow(tmp_path).password, airflow(tmp_path)._configuration):
        with pytest.raises(Refusal, match=r"secrets\.json is missing or cannot be read.* restore the file") as refused:
            ask()
        assert f"delete {tmp_path / 'airflow'}: Airflow then forgets its runs" in str(refused.value)
    assert (path.read_text() if path.exists() else None) == content
    first.database.unlink()
    assert airflow(tmp_path).password() == json.loads(path.read_text())["password"], "nothing was made with them"
