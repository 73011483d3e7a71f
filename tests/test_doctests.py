"""The examples in docstrings are true. They are found in the text of the product, so none of them is passed over."""

import doctest
import os
import re
import tempfile
from importlib import import_module

import pytest

from jobs.settings import PROJECT

_EXAMPLE = re.compile(r"^ *>>> ", re.MULTILINE)
# Airflow makes its home folder when it is imported. If no other test has given it a folder, this does.
if "AIRFLOW_HOME" not in os.environ:
    os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="airflow-home-")
# Each folder with examples, and the folder from which Python imports its modules.
_FOLDERS = {"jobs": ".", "local": ".", "plugins": "plugins"}


def examples() -> dict[str, int]:
    """The modules with examples, and how many examples each has. Other modules are not imported: some take seconds."""
    found = {}
    for folder, root in _FOLDERS.items():
        for file in sorted((PROJECT / folder).rglob("*.py")):
            module = ".".join(file.relative_to(PROJECT / root).with_suffix("").parts)
            found[module.removesuffix(".__init__")] = len(_EXAMPLE.findall(file.read_text()))
    return {module: count for module, count in found.items() if count}


EXAMPLES = examples()


def test_examples_are_found() -> None:
    assert {"jobs.pipelines.slices", "jobs.lake.delta.merging", "local.bench.year.clock"} <= set(EXAMPLES)


@pytest.mark.parametrize("module", EXAMPLES)
def test_every_example_is_true(module: str) -> None:
    result = doctest.testmod(import_module(module))
    assert result.failed == 0, "see the output of doctest"
    # doctest does not look into every kind of function: in Python 3.11 it passes over a cached property.
    assert result.attempted == EXAMPLES[module]
