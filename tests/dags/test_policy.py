"""Rules for every DAG: the exact set, its docs, owners and tags, and how quickly its file parses."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.pipelines import PIPELINES, SOURCES

HERE = Path(__file__).parent
DAGS = HERE.parents[1] / "dags"
ALLOWED = ("datetime", "airflow.sdk", "airflow.providers", "tideline_airflow", "jobs.pipelines")


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("airflow")
    pools = {"TIDELINE_RECOMPUTE_POOL": "recomputes", "TIDELINE_ACCOUNT_POOL": "accounts"}
    env = {**os.environ, **pools, "AIRFLOW_HOME": str(home), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    answer = home / "answer.json"
    ran = subprocess.run(
        [sys.executable, str(HERE / "parse_dags.py"), str(answer)], env=env, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(answer.read_text())


def test_the_exact_set_of_dags(parsed: dict[str, Any]) -> None:
    assert parsed["errors"] == {}
    assert set(parsed["dags"]) == {
        "control_streams",
        "provision_topics",
        "generate_demo_traffic",
        "publish_blocked",
        "reset_stream",
        "rollback_slice",
        "stream_ingest",
        "stream_rolling_sum",
        "stream_rolling_sum_sliding",
        "stream_word_count",
        "upkeep",
        *(f"{what}_{name}" for what in ("recompute", "account", "check") for name in PIPELINES),
    }
    assert {f"stream_{name}" for name in PIPELINES} < set(parsed["dags"])


def test_who_shares_a_pool_is_served_in_turn(parsed: dict[str, Any]) -> None:
    """With equal weights Airflow would always serve the same pipelines, those that it finds first."""
    shared = [tuple(each) for dag in parsed["dags"].values() for each in dag["pools"] if each[0] != "default_pool"]
    assert set(shared) == {("recomputes", "FirstCome"), ("accounts", "FirstCome")}
    # A plan, a recompute and an account of each pipeline.
    assert len(shared) == 3 * len(PIPELINES)


def test_each_dag_is_owned_tagged_and_described(parsed: dict[str, Any]) -> None:
    for dag_id, dag in parsed["dags"].items():
        assert dag["owners"] == ["tideline"], dag_id
        assert "tideline" in dag["tags"], dag_id
        assert len(dag["tags"]) > 1, dag_id
        assert dag["description"], dag_id


@pytest.mark.parametrize("chapter", ["**Example.**", "**Recovery.**", "**Triage.**"])
def test_each_docstring_is_the_operators_manual(parsed: dict[str, Any], chapter: str) -> None:
    for dag_id, dag in parsed["dags"].items():
        assert chapter in dag["doc"], dag_id
        assert dag["doc"] == ast.get_docstring(ast.parse((DAGS / dag["file"]).read_text()), clean=False), dag_id


def test_parsing_stays_light(parsed: dict[str, Any]) -> None:
    assert parsed["heavy"] == []
    assert set(parsed["seconds"]) == {path.name for path in DAGS.glob("*.py")}
    slow = {file: seconds for file, seconds in parsed["seconds"].items() if seconds >= 0.5}
    assert not slow


def test_a_dag_file_imports_nothing_else() -> None:
    for file in DAGS.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert all(str(name).startswith(ALLOWED) for name in names), (file.name, names)


def test_a_stream_runs_once_and_waits_to_be_wanted(parsed: dict[str, Any]) -> None:
    streams = [dag for dag_id, dag in parsed["dags"].items() if dag_id.startswith("stream_")]
    shape = ("max_active_runs", "is_paused_upon_creation", "tasks", "has_start_date")
    assert [tuple(dag[name] for name in shape) for dag in streams] == [(1, True, ["run"], True)] * len(streams)


def test_a_recompute_is_dry_by_hand_and_one_at_a_time(parsed: dict[str, Any]) -> None:
    for name in PIPELINES:
        dag = parsed["dags"][f"recompute_{name}"]
        assert dag["tasks"] == ["plan", "recompute", "audit", "publish", "all_final"]
        assert (dag["max_active_runs"], dag["is_paused_upon_creation"]) == (1, True)
        assert dag["params"] == {"from": None, "to": None, "outdated": False, "dry_run": True, "reason": None}
        assert dag["deadlines"] == 1


def test_what_changes_slices_by_hand_changes_nothing_unless_told(parsed: dict[str, Any]) -> None:
    assert parsed["dags"]["rollback_slice"]["params"]["apply"] is False
    assert parsed["dags"]["publish_blocked"]["tasks"] == ["show", "approve", "publish"]
    assert parsed["dags"]["publish_blocked"]["retries"][2] == 0


def test_whatever_fails_is_told_and_so_is_its_recovery(parsed: dict[str, Any]) -> None:
    for dag_id, dag in parsed["dags"].items():
        assert dag["failed_tasks_tell"] == [["task failed"]] * len(dag["tasks"]), dag_id
        assert dag["run_tells"] == [["run failed"], ["run succeeded"]], dag_id


def test_no_dag_makes_something_else_of_what_a_person_types(parsed: dict[str, Any]) -> None:
    """A template that renders to Python would turn the reason "2026" into a number; `dag.param` keeps every type."""
    assert [dag_id for dag_id, dag in parsed["dags"].items() if dag["renders_to_python"]] == []


def test_upkeep_needs_nobody_to_switch_it_on(parsed: dict[str, Any]) -> None:
    dag = parsed["dags"]["upkeep"]
    assert (dag["is_paused_upon_creation"], dag["max_active_runs"], dag["deadlines"]) == (False, 1, 1)


def test_traffic_is_never_sent_twice(parsed: dict[str, Any]) -> None:
    assert parsed["dags"]["generate_demo_traffic"]["retries"] == [0]


def test_every_field_of_a_form_has_a_title_and_a_sentence(parsed: dict[str, Any]) -> None:
    fields = [field for dag in parsed["dags"].values() for field in dag["explained"].values()]
    assert fields
    assert [(title, text) for title, text in fields if not title or not str(text).endswith(".")] == []


def test_the_form_offers_every_source(parsed: dict[str, Any]) -> None:
    params = parsed["dags"]["generate_demo_traffic"]["params"]
    assert set(params["sources"]) <= set(SOURCES)
    assert set(params) == {"sources", "rate", "seconds", "late", "duplicate", "corrupt", "seed"}
