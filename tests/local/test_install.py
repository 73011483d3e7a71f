"""The installation for a newcomer: one sentence names a missing tool, before anything is written."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from jobs.settings import PROJECT


@pytest.fixture
def checkout(tmp_path):
    """A project folder with only the script, and a PATH with only the programs that it calls."""
    script = tmp_path / "project" / "local" / "install.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(PROJECT / "local" / "install.sh", script)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("dirname", "rm"):
        (commands / name).symlink_to(shutil.which(name))
    return script


def _fake_python(checkout: Path, body: str) -> None:
    python = checkout.parent.parent.parent / "bin" / "python3"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)


def _install(checkout: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    env["PATH"] = str(checkout.parent.parent.parent / "bin")
    ran = subprocess.run(["/bin/sh", str(checkout)], env=env, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 1
    assert not (checkout.parent.parent / ".venv").exists()
    return ran


def test_no_python_is_said(checkout):
    assert _install(checkout).stderr == (
        "tideline: Python 3.11, 3.12 or 3.13 is needed, found no python3: "
        "install one and name it, e.g. make install PYTHON=python3.11\n"
    )


def test_an_old_python_is_said(checkout):
    _fake_python(checkout, 'case "$1" in --version) echo "Python 3.9.2" ;; *) exit 1 ;; esac')
    assert "3.13 is needed, found Python 3.9.2: install one" in _install(checkout).stderr


def test_a_missing_venv_module_is_said(checkout):
    _fake_python(checkout, 'case "$2" in *ensurepip*) exit 1 ;; *) exit 0 ;; esac')
    told = _install(checkout).stderr
    assert "has no venv module: install it (Debian/Ubuntu: apt-get install python3-venv), or install uv" in told
    assert not (checkout.parent.parent / ".tideline" / "uv").exists()


def test_make_explains_itself():
    shown = subprocess.run(["make", "help"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    wanted = (
        "help",
        "install",
        "demo",
        "up",
        "down",
        "status",
        "test",
        "test-faults",
        "lint",
        "format",
        "bench",
        "clean",
    )
    assert set(wanted) <= {line.split()[0] for line in shown.splitlines()}
