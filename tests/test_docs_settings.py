"""Settings: the pages and `.env.example` name those that code reads, with their defaults."""

import re
from collections.abc import Iterator

import pytest

from jobs import settings as module
from jobs.settings import PROJECT, KafkaSettings, KeptDays, QueryLimits, Settings, reserve_bytes
from local.platform.settings import _ALERTS, StackSettings
from tests import pages
from tests.pages import CONTRIBUTING, DECISIONS, EXAMPLE, TYPED_FROM, code

_NAME = r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+"
_SHOWN = dict(re.findall(rf"^#?({_NAME})=(.*)$", EXAMPLE.read_text(), re.MULTILINE))
_READ = re.compile(rf'(?:(?:whole_number|_port)\([^"\n]*|env(?:iron|ironment\(\))?(?:\.get\(|\[))"({_NAME})"')
_DEFAULT = re.compile(rf'(?:whole_number|_port)\([^"\n]*"({_NAME})", ([0-9_]+)\)')
# Code reads these, but they are no settings of ours: a switch for tests, and the place of Java.
_INTERNAL = {"TIDELINE_FAILPOINT", "JAVA_HOME"}
# The clients of object stores read these themselves.
_OF_CLIENTS = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ALLOW_HTTP"}
# Pages name them although no code of ours reads them: settings of other programs, connections of Airflow.
_OF_OTHERS = {
    "AIRFLOW_CONN_SPARK_DEFAULT",
    "AIRFLOW_CONN_TIDELINE_KAFKA",
    "AWS_CONDITIONAL_PUT",
    "AWS_S3_ALLOW_UNSAFE_RENAME",
    "AWS_S3_LOCKING_PROVIDER",
    "HADOOP_CONF_DIR",
    "JAVA_TOOL_OPTIONS",
    "SPARK_CONF_DIR",
    "SPARK_LOCAL_DIRS",
}
# Names that are no settings: values of one, and constants of the code.
_NO_SETTINGS = {"SASL_PLAINTEXT", "SASL_SSL", "CLOCK_SKEW_MS", "WORD_COUNT"}
# The example shows what these are on some machine, or an address that is only an example.
_PLACES = {"TIDELINE_HOME", "LAKE_ROOT", "TIDELINE_JARS", "SPARK_SCRATCH"}
_OF_A_MACHINE = {*_PLACES, "SPARK_MASTER", "SPARK_SHUFFLE_PARTITIONS", *_ALERTS}


def named() -> set[str]:
    """All names in capitals that are written as code on pages for users."""
    lines = (line for path in [*TYPED_FROM, *DECISIONS] if path not in (EXAMPLE, CONTRIBUTING) for line in code(path))
    return {name for line in lines for name in re.findall(rf"\b{_NAME}\b", line)}


def sources() -> list[str]:
    """The text of each file of the product's code."""
    return [file.read_text() for folder in ("jobs", "plugins", "local") for file in (PROJECT / folder).rglob("*.py")]


def read_by_code() -> set[str]:
    found = {name for text in sources() for name in _READ.findall(text)}
    of_airflow = {name for name in found if name.startswith("AIRFLOW__")}
    return (found | set(_ALERTS) | {f"KAFKA_{name.upper()}" for name in KafkaSettings.__annotations__}) - of_airflow


def in_containers() -> set[str]:
    """The settings that the containers, or the scripts around them, read."""
    files = [PROJECT / "docker-compose.yml", *(PROJECT / "local" / "containers").glob("*.sh")]
    return {name for file in files for name in re.findall(rf"\b{_NAME}\b", file.read_text())}


def test_a_setting_that_a_page_names_exists() -> None:
    assert named() - set(_SHOWN) - read_by_code() == (_OF_OTHERS | _NO_SETTINGS)


def test_every_setting_that_code_reads_is_documented() -> None:
    assert len(read_by_code()) > 40
    assert read_by_code() - set(_SHOWN) - named() == _INTERNAL


def test_every_setting_of_the_example_is_read() -> None:
    assert set(_SHOWN) - read_by_code() - in_containers() == _OF_CLIENTS


@pytest.mark.usefixtures("no_file_of_settings")
def test_the_example_shows_the_defaults() -> None:
    shown = {name: value for name, value in _SHOWN.items() if value and name not in _OF_A_MACHINE}
    for settings in (Settings, StackSettings, QueryLimits, KeptDays):
        assert settings.from_env(shown) == settings.from_env({})
    assert reserve_bytes(shown) == reserve_bytes({})
    in_calls = {name: default.replace("_", "") for text in sources() for name, default in _DEFAULT.findall(text)}
    assert {name: _SHOWN[name] for name in in_calls if name not in _OF_A_MACHINE}.items() <= in_calls.items()


@pytest.fixture
def no_file_of_settings(tmp_path, monkeypatch) -> None:
    """Otherwise the developer's `.env` would count."""
    monkeypatch.setattr(module, "PROJECT", tmp_path)


def defaults_on_pages() -> Iterator[tuple[str, str, str]]:
    for path in TYPED_FROM:
        for name, default in re.findall(rf"`({_NAME})` \(([\d,]+)\)", pages.read(path)):
            yield path.name, name, default.replace(",", "")


def test_a_default_on_a_page_is_that_of_the_example() -> None:
    assert len(set(defaults_on_pages())) > 5
    assert [(page, name) for page, name, default in defaults_on_pages() if _SHOWN[name] != default] == []


@pytest.mark.usefixtures("no_file_of_settings")
def test_the_ports_are_those_of_the_platform() -> None:
    rows = pages.table("operations.md", "The parts", "port").rows
    shown = {pages.in_backticks(setting)[0]: int(port) for port, _, setting in rows}
    assert shown == StackSettings.from_env({}).ports()
