"""Settings come from the environment, then from `.env`, then from the default. A bad value is refused by name."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import settings as module
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings, QueryLimits, Settings, binding_conf, read_env_file, spark_conf, whole_number


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary project folder, so that the developer's `.env` is not read."""
    monkeypatch.setattr(module, "PROJECT", tmp_path)
    return tmp_path


def test_defaults(project: Path) -> None:
    settings = Settings.from_env({})
    assert settings.lake_root == project / ".tideline" / "lake"
    assert settings.jars == project / ".tideline" / "jars"
    assert settings.kafka == KafkaSettings(bootstrap="127.0.0.1:9092", security_protocol="PLAINTEXT")
    assert settings.spark_master.startswith("local[")
    assert settings.driver_memory == "1g"
    assert settings.shuffle_partitions is None
    assert (settings.trigger_ms, settings.ingest_trigger_ms, settings.max_offsets) == (1000, 2000, 5_000_000)
    assert settings.stall_seconds == 180
    assert settings.live_kept_seconds == 3600


@pytest.mark.parametrize(
    ("cores", "master", "partitions"),
    [(1, "local[2]", 1), (2, "local[3]", 2), (64, "local[5]", 8), (None, "local[3]", 2)],
)
def test_sized_for_the_machine(
    cores: int | None, master: str, partitions: int, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    settings = Settings.from_env({"TIDELINE_JARS": str(settings.jars)})
    assert settings.spark_master == master
    assert spark_conf(settings)["spark.sql.shuffle.partitions"] == str(partitions)
    # A lake that moves to a machine with another number of cores keeps the partitions of its checkpoints.
    assert "spark.sql.shuffle.partitions" not in binding_conf(settings)
    assert binding_conf(replace(settings, shuffle_partitions=5))["spark.sql.shuffle.partitions"] == "5"


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (8, 7), (None, 1)])
def test_a_query_leaves_a_core_to_the_streams(cores: int | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert QueryLimits().threads == threads


def test_limits_of_queries(project: Path) -> None:
    assert QueryLimits.from_env({}) == QueryLimits(memory_mb=1024, seconds=60, rows=100_000)
    (project / ".env").write_text("QUERY_ROWS=7\nQUERY_SECONDS=8\n")
    assert QueryLimits.from_env({"QUERY_SECONDS": "9"}) == QueryLimits(memory_mb=1024, seconds=9, rows=7)
    with pytest.raises(Refusal, match="QUERY_MEMORY_MB='1g' is no positive whole number"):
        QueryLimits.from_env({"QUERY_MEMORY_MB": "1g"})


def test_the_environment_wins_over_the_file_and_the_file_over_the_default(project: Path) -> None:
    (project / ".env").write_text("STREAM_TRIGGER_MS=700\nINGEST_TRIGGER_MS=800\nSPARK_DRIVER_MEMORY=2g\n")
    settings = Settings.from_env({"STREAM_TRIGGER_MS": "900", "SPARK_DRIVER_MEMORY": ""})
    assert (settings.trigger_ms, settings.ingest_trigger_ms) == (900, 800)
    assert settings.driver_memory == "1g", "set to nothing in the environment: the default"


def test_without_an_argument_the_process_s_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAM_TRIGGER_MS", "123")
    assert Settings.from_env().trigger_ms == 123


def test_a_home_moves_the_lake_and_not_the_jars(project: Path, tmp_path: Path) -> None:
    settings = Settings.from_env({"TIDELINE_HOME": str(tmp_path / "home")})
    assert settings.lake_root == tmp_path / "home" / "lake"
    assert settings.scratch == tmp_path / "home" / "scratch"
    assert settings.jars == project / ".tideline" / "jars"
    elsewhere = Settings.from_env({"TIDELINE_HOME": "/a", "LAKE_ROOT": "/b", "TIDELINE_JARS": "/c"})
    assert (elsewhere.lake_root, elsewhere.jars) == (Path("/b"), Path("/c"))


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("", {}),
        ("A=1", {"A": "1"}),
        ("  A = 1  \n", {"A": "1"}),
        ("A=", {"A": ""}),
        ("A=x=y", {"A": "x=y"}),
        ("# A=1\n#B=2\n\nC=3", {"C": "3"}),
        ("A='one two'\nB=\"three\"", {"A": "one two", "B": "three"}),
        ("no pair\nA=1", {"A": "1"}),
        ("A=1\nA=2", {"A": "2"}),
        ("KAFKA_PASSWORD=a#b", {"KAFKA_PASSWORD": "a#b"}),
    ],
)
def test_a_file_of_settings(text: str, pairs: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    assert read_env_file(tmp_path / "file") == pairs


def test_no_file_of_settings_is_fine(tmp_path: Path) -> None:
    assert read_env_file(tmp_path / ".env") == {}
    assert read_env_file(tmp_path) == {}


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "1e3", " 5", "0x10"])
@pytest.mark.parametrize(
    "name", ["STREAM_TRIGGER_MS", "INGEST_TRIGGER_MS", "STREAM_MAX_OFFSETS", "SPARK_SHUFFLE_PARTITIONS"]
)
def test_a_number_that_is_none_is_refused(name: str, text: str) -> None:
    with pytest.raises(Refusal, match=rf"^{name}='{text}' is no positive whole number; the default is [0-9]+$"):
        Settings.from_env({name: text})


def test_a_number() -> None:
    assert whole_number({"N": "42"}, "N", 7) == 42
    assert whole_number({"N": ""}, "N", 7) == whole_number({}, "N", 7) == 7


@pytest.mark.parametrize(
    ("root", "folder"),
    [
        ("/data/lake", "/data/lake"),
        ("file:///data/lake", "/data/lake"),
        ("file:/data/lake", "/data/lake"),
        ("/data/../lake/", "/lake"),
        ("/data/a lake:1", "/data/a lake:1"),
        ("~/lake", str(Path.home() / "lake")),
    ],
)
def test_the_lake_s_folder(root: str, folder: str) -> None:
    assert Settings.from_env({"LAKE_ROOT": root}).lake_root == Path(folder)


def test_a_lake_in_a_bucket(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark gets the bucket's address in its settings; all other clients read it from the environment."""
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.setenv(name, "")
    for jar in ("spark/delta.jar", "s3/hadoop-aws.jar"):
        (project / ".tideline" / "jars" / jar).parent.mkdir(parents=True)
        (project / ".tideline" / "jars" / jar).touch()
    store = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000", "AWS_REGION": "eu-1"}
    settings = Settings.from_env({"LAKE_ROOT": "s3a://lakes/tideline", **store})
    assert str(settings.lake_root) == "s3://lakes/tideline"
    assert {name: os.environ[name] for name in store} == store
    conf = spark_conf(settings)
    assert conf["spark.hadoop.fs.s3.impl"] == "org.apache.hadoop.fs.s3a.S3AFileSystem"
    assert conf["spark.hadoop.fs.s3a.endpoint"] == "http://127.0.0.1:9000"
    assert conf["spark.hadoop.fs.s3a.endpoint.region"] == "eu-1"
    assert "/s3/hadoop-aws.jar" in conf["spark.jars"]
    on_a_disk = spark_conf(replace(settings, lake_root=Path("/lake")))
    assert not [name for name in on_a_disk if ".s3" in name]
    assert "/s3/" not in on_a_disk["spark.jars"]


@pytest.mark.parametrize("root", ["hdfs://host:8020/lake", "abfs://c@a/lake", "s3a://"])
def test_a_lake_that_is_no_folder_is_refused(root: str) -> None:
    with pytest.raises(
        Refusal, match=f"LAKE_ROOT='{root}' is not supported: use a path, file://path or s3a://bucket/path"
    ):
        Settings.from_env({"LAKE_ROOT": root})


SECURE = KafkaSettings(
    bootstrap="broker:9094",
    security_protocol="SASL_SSL",
    sasl_mechanism="SCRAM-SHA-512",
    username="tideline",
    password="hush",
    ssl_cafile="/ca.pem",
    ssl_certfile="/cert.pem",
    ssl_keyfile="/key.pem",
    ssl_key_password="whisper",
)


@pytest.mark.parametrize("kafka", [KafkaSettings(), KafkaSettings(bootstrap="a:1,b:2"), SECURE])
def test_kafka_s_settings_go_through_the_environment(kafka: KafkaSettings) -> None:
    env = kafka.as_env()
    assert KafkaSettings.from_env(env) == kafka
    assert Settings.from_env(env).kafka == kafka
    assert all(name.startswith("KAFKA_") and value for name, value in env.items())


def test_secrets_do_not_show() -> None:
    shown = repr(replace(Settings.from_env({}), kafka=SECURE))
    assert "tideline" in shown
    assert "hush" not in shown
    assert "whisper" not in shown


def test_every_setting_is_in_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    example = set(re.findall(r"^#?([A-Z_]+)=", (module.PROJECT / ".env.example").read_text(), re.MULTILINE))
    read = set(re.findall(r'"((?:TIDELINE|LAKE|SPARK|STREAM|INGEST|LIVE)_[A-Z_]+)"', Path(module.__file__).read_text()))
    assert len(read) >= 8
    assert read | set(SECURE.as_env()) <= example


# -- The settings for Spark --


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    jars = tmp_path / "jars" / "spark"
    jars.mkdir(parents=True)
    for name in ("b.jar", "a.jar", "readme.txt"):
        (jars / name).touch()
    return replace(Settings.from_env({}), jars=jars.parent, spark_master="local[3]", shuffle_partitions=2)


def test_without_jars_nothing_is_started(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"no Spark jars in .*: fetch them with `tideline jars`"):
        spark_conf(replace(settings, jars=tmp_path / "none"))
    (tmp_path / "empty" / "spark").mkdir(parents=True)
    with pytest.raises(Refusal, match="no Spark jars"):
        spark_conf(replace(settings, jars=tmp_path / "empty"))


def test_what_spark_is_told(settings: Settings) -> None:
    conf = spark_conf(settings)
    assert [Path(jar).name for jar in conf["spark.jars"].split(",")] == ["a.jar", "b.jar"]
    assert conf["spark.driver.memory"] == settings.driver_memory
    assert conf["spark.sql.shuffle.partitions"] == "2"
    assert conf["spark.sql.session.timeZone"] == "UTC"
    assert conf["spark.sql.adaptive.enabled"] == "false"
    assert all(isinstance(value, str) for value in conf.values())


def test_a_local_driver_makes_files_without_starting_processes(settings: Settings) -> None:
    (settings.jars / "spark" / "hadoop-bare-naked-local-fs-1.jar").touch()
    conf = spark_conf(settings)
    # Spark looks for its jars through the file system, so this jar must be there before.
    assert Path(conf["spark.driver.extraClassPath"]).name == "hadoop-bare-naked-local-fs-1.jar"
    assert conf["spark.hadoop.fs.file.impl"].endswith(".BareLocalFileSystem")
    assert "spark.hadoop.fs.file.impl" not in spark_conf(replace(settings, spark_master="spark://master:7077"))


def test_only_a_local_driver_keeps_to_this_machine(settings: Settings) -> None:
    assert spark_conf(settings)["spark.driver.bindAddress"] == "127.0.0.1"
    assert "spark.driver.bindAddress" not in spark_conf(replace(settings, spark_master="spark://master:7077"))


def test_no_secret_is_handed_to_spark_s_settings(settings: Settings) -> None:
    """Those settings appear in argv and in Spark's UI."""
    told = " ".join(spark_conf(replace(settings, kafka=SECURE)).values())
    assert "hush" not in told
    assert "whisper" not in told
