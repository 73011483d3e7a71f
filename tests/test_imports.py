"""Each import contract of pyproject.toml works: one planted import breaks it."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jobs.settings import PROJECT

PLANTED = {
    "folders use the folders above them": ("jobs/lake/ledger.py", "import jobs.finality.late"),
    "the folders of local are layers": ("local/jars/java.py", "import local.platform.ports"),
    "the folders of the plugin are layers": ("plugins/tideline_airflow/links.py", "import tideline_airflow.console"),
    "definitions use the standard library only": ("jobs/pipelines/shipped/sources.py", "import jobs.settings"),
    "transforms are DataFrame to DataFrame": ("jobs/transforms/parse.py", "import jobs.control.folder"),
    "jobs know nothing of Airflow": ("jobs/streaming/driver.py", "import airflow"),
    "jobs know nothing of the embedded stack": ("jobs/streaming/driver.py", "import local.platform.ports"),
    "the embedded stack uses jobs, and nothing above them": ("local/platform/ports.py", "import jobs.cli"),
    "the plugin is free of Spark": ("plugins/tideline_airflow/scheduling/defaults.py", "import pyspark"),
    "only the audit knows Great Expectations": ("jobs/finality/recompute.py", "import great_expectations"),
    "the audit judges what it is given": ("jobs/quality/verdict.py", "import jobs.settings"),
}


def test_every_contract_can_be_broken(tmp_path: Path) -> None:
    contracts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert [contract["name"] for contract in contracts] == list(PLANTED)
    for name in ("jobs", "local"):
        shutil.copytree(PROJECT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PROJECT / "plugins", tmp_path / "plugins", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    for file, planted in PLANTED.values():
        with (tmp_path / file).open("a") as source:
            source.write(f"\n{planted}\n")
    found = lint(tmp_path)
    for name in PLANTED:
        assert f"{name} BROKEN" in found, found
    # Several planted imports together may break a contract of layers, too. So each of these two names its own import.
    assert "local.jars is not allowed to import local.platform:" in found, found
    assert "tideline_airflow.links is not allowed to import tideline_airflow.console:" in found, found


def lint(project: Path) -> str:
    path = os.pathsep.join([str(project), str(project / "plugins")])
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode not in (0, 1):
        pytest.fail(done.stderr)
    return done.stdout
