"""The installation for a newcomer: one sentence names a missing tool, before anything is written."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jobs.settings import PROJECT


@pytest.fixture
def checkout(tmp_path):
    """A project folder with only the scripts, and a PATH with only the programs that they call."""
    script = tmp_path / "project" / "local" / "install.sh"
    script.parent.mkdir(parents=True)
    for name in ("install.sh", "step.sh"):
        shutil.copy(PROJECT / "local" / name, script.with_name(name))
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("date", "dirname", "rm", "sleep"):
        (commands / name).symlink_to(shutil.which(name))
    return script


def _fake_python(checkout: Path, body: str) -> None:
    _fake(checkout, "python3", body)


def _fake(checkout: Path, name: str, body: str) -> None:
    command = checkout.parent.parent.parent / "bin" / name
    command.write_text(f"#!/bin/sh\n{body}\n")
    command.chmod(0o755)


def _run(checkout: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHON"} | settings
    env["PATH"] = str(checkout.parent.parent.parent / "bin")
    return subprocess.run(["/bin/sh", str(checkout)], env=env, capture_output=True, text=True, check=False, timeout=60)


def _install(checkout: Path) -> subprocess.CompletedProcess[str]:
    ran = _run(checkout)
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


def _lines(told: str) -> list[str]:
    """What was told, with N for the seconds that have passed."""
    return re.sub(r"after \d+ s$", "after N s", told, flags=re.MULTILINE).splitlines()


def test_uv_is_fetched_and_called_with_its_time(checkout):
    """The fake Python makes an environment with a fake pip, which makes a fake uv."""
    calls = checkout.parent.parent / "calls"
    for name, body in (("pip", f"echo pip $* >>{calls}; mv uv.fake .tideline/uv/bin/uv"), ("uv", f"echo $* >>{calls}")):
        made = checkout.parent.parent / f"{name}.fake"
        made.write_text(f"#!/bin/sh\n{body}\n")
        made.chmod(0o755)
    _fake_python(checkout, '[ "$2" != venv ] || { mkdir -p "$3/bin" && mv pip.fake "$3/bin/pip"; }')
    for name in ("mkdir", "mv"):
        (checkout.parent.parent.parent / "bin" / name).symlink_to(shutil.which(name))
    ran = _run(checkout)
    assert ran.returncode == 0, ran.stderr
    assert _lines(ran.stderr) == [
        "tideline: fetching uv into .tideline/uv (about 5 s on a fast line)",
        "tideline: fetching uv into .tideline/uv: done after N s",
        "tideline: installing up to 1.3 GB into .venv (the first time about 40 s on a fast line)",
        "tideline: installing up to 1.3 GB into .venv: done after N s",
    ]
    called = [" ".join(line.split()[:2]) for line in calls.read_text().splitlines()]
    assert called == ["pip install", "venv --quiet", "pip sync", "pip install"]


def test_a_failed_fetch_of_uv_is_said(checkout):
    broken = "echo no answer >&2; exit 3"
    _fake_python(checkout, f'[ "$2" != venv ] || {{ {broken}; }}')
    assert _lines(_install(checkout).stderr)[1:] == [
        "tideline: fetching uv into .tideline/uv: failed after N s",
        "no answer",
        "tideline: uv could not be fetched: check the network (pip's own settings apply), or install uv yourself",
    ]


def test_a_failed_installation_keeps_the_exit_code_and_the_words_of_uv(checkout):
    _fake_python(checkout, "exit 0")
    _fake(checkout, "uv", '[ "$2" != sync ] || { echo "no answer" >&2; exit 7; }')
    registry = "registry.example"
    ran = _run(checkout, UV_DEFAULT_INDEX=f"https://{registry}/simple", PIP_INDEX_URL=f"https://{registry}/simple")
    assert ran.returncode == 7
    assert _lines(ran.stderr)[-2:] == ["tideline: installing up to 1.3 GB into .venv: failed after N s", "no answer"]
    assert registry not in ran.stderr + ran.stdout


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
