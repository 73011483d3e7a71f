"""The settings of jobs, read once from the environment. Every setting is explained in `.env.example`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from jobs.refusal import Refusal
from jobs.storage.folders import Folder, folder_at

# Creates and commits in a bucket rely on these settings of its clients. No other values are allowed.
_SAFE_VALUES = {
    "AWS_CONDITIONAL_PUT": ("etag",),
    "AWS_S3_ALLOW_UNSAFE_RENAME": ("false", "0", "no", "off"),
}
_SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
DRIVER_OPTIONS = "spark.driver.extraJavaOptions"
PROJECT = Path(__file__).resolve().parent.parent
JVM_OPTIONS = (
    # Throughput counts, not pauses: +17 % to +32 % over G1 on two cores.
    "-XX:+UseParallelGC",
    f"-Dlog4j2.configurationFile={(PROJECT / 'jobs' / 'log4j2.properties').as_uri()}",
)


def read_env_file(path: Path) -> dict[str, str]:
    """The NAME=value lines of a `.env` file; empty if there is no such file."""
    if not path.is_file():
        return {}
    lines = (line.strip() for line in path.read_text().splitlines())
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name.strip(): value.strip().strip("'\"") for name, equals, value in pairs if equals}


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The settings of the process. `.env` in the project's folder adds those that the environment does not set."""
    return {**read_env_file(PROJECT / ".env"), **(os.environ if env is None else env)}


def whole_number(env: Mapping[str, str], name: str, default: int) -> int:
    """The value of a setting that must be a positive whole number."""
    text = env.get(name, "") or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise Refusal(f"{name}={text!r} is no positive whole number; the default is {default}")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class KafkaSettings:
    """How to reach Kafka, for kafka-python and for Spark. Secrets never show in a repr."""

    bootstrap: str = "127.0.0.1:9092"
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ssl_cafile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_key_password: str | None = field(default=None, repr=False)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Read `KAFKA_BOOTSTRAP`, `KAFKA_SECURITY_PROTOCOL`, … (`.env.example` lists them)."""
        set_ = {name: env[f"KAFKA_{name.upper()}"] for name in cls.__annotations__ if env.get(f"KAFKA_{name.upper()}")}
        return cls(**set_)

    def as_env(self) -> dict[str, str]:
        """The environment that `from_env` turns back into these settings."""
        return {f"KAFKA_{name.upper()}": value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class QueryLimits:
    """How much one query may use. The streams on the same machine need the rest."""

    memory_mb: int = 1024
    seconds: int = 60
    rows: int = 100_000

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        """Read `QUERY_MEMORY_MB`, `QUERY_SECONDS` and `QUERY_ROWS`."""
        env = environment(env)
        return cls(
            memory_mb=whole_number(env, "QUERY_MEMORY_MB", cls.memory_mb),
            seconds=whole_number(env, "QUERY_SECONDS", cls.seconds),
            rows=whole_number(env, "QUERY_ROWS", cls.rows),
        )

    @property
    def threads(self) -> int:
        """All cores but one, which is left to the streams."""
        return max(1, (os.cpu_count() or 2) - 1)


@dataclass(frozen=True, kw_only=True)
class KeptDays:
    """How many days old data is kept. For events, the source's definition has its own setting."""

    incidents: int = 90
    logs: int = 7
    # These are for tables: ledger lines that are not the newest of their slice; differences and their totals; replaced
    # versions of final slices.
    ledger: int = 400
    drift: int = 400
    final_versions: int = 30

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        """Read `INCIDENTS_KEPT_DAYS`, `LOGS_KEPT_DAYS`, … (`.env.example` lists them)."""
        env = environment(env)
        return cls(
            incidents=whole_number(env, "INCIDENTS_KEPT_DAYS", cls.incidents),
            logs=whole_number(env, "LOGS_KEPT_DAYS", cls.logs),
            ledger=whole_number(env, "LEDGER_KEPT_DAYS", cls.ledger),
            drift=whole_number(env, "DRIFT_KEPT_DAYS", cls.drift),
            final_versions=whole_number(env, "FINAL_VERSIONS_KEPT_DAYS", cls.final_versions),
        )


def replaced_kept_minutes(env: Mapping[str, str] | None = None) -> int:
    """How long a removed file of a stream's table is kept: `REPLACED_FILES_KEPT_MINUTES`; if not set, six hours."""
    return whole_number(environment(env), "REPLACED_FILES_KEPT_MINUTES", 360)


def reserve_bytes(env: Mapping[str, str] | None = None) -> int:
    """How much of the lake's disk must be free before new work begins: `LAKE_RESERVE_MB`."""
    return whole_number(environment(env), "LAKE_RESERVE_MB", 500) * 1_000_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a job: its lake, its jars, Kafka, Spark and the limits of streams."""

    lake_root: Folder
    jars: Path
    # Temporary folders of drivers.
    scratch: Path
    kafka: KafkaSettings
    spark_master: str
    driver_memory: str
    # None: as many as the checkpoint has; for a new checkpoint, one per core, at most 8.
    shuffle_partitions: int | None
    trigger_ms: int
    ingest_trigger_ms: int
    max_offsets: int
    stall_seconds: int
    live_kept_seconds: int
    # For a lake in a bucket: the address of a store that is not Amazon's, and the region.
    s3_endpoint: str | None = None
    s3_region: str | None = None

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        """The settings of the process. `.env` in the project's folder adds those that the environment does not set."""
        env = environment(env)
        home = Path(env.get("TIDELINE_HOME") or PROJECT / ".tideline")
        lake_root = folder_at(env.get("LAKE_ROOT") or str(home / "lake"))
        if not isinstance(lake_root, Path):
            _hand_to_clients(env)
        return cls(
            lake_root=lake_root,
            jars=Path(env.get("TIDELINE_JARS") or PROJECT / ".tideline" / "jars").resolve(),
            scratch=Path(env.get("SPARK_SCRATCH") or home / "scratch").resolve(),
            kafka=KafkaSettings.from_env(env),
            spark_master=env.get("SPARK_MASTER") or f"local[{min(os.cpu_count() or 2, 4) + 1}]",
            driver_memory=env.get("SPARK_DRIVER_MEMORY") or "1g",
            shuffle_partitions=(
                whole_number(env, "SPARK_SHUFFLE_PARTITIONS", 1) if env.get("SPARK_SHUFFLE_PARTITIONS") else None
            ),
            trigger_ms=whole_number(env, "STREAM_TRIGGER_MS", 1000),
            ingest_trigger_ms=whole_number(env, "INGEST_TRIGGER_MS", 2000),
            max_offsets=whole_number(env, "STREAM_MAX_OFFSETS", 5_000_000),
            stall_seconds=whole_number(env, "STREAM_STALL_SECONDS", 180),
            live_kept_seconds=whole_number(env, "LIVE_KEPT_SECONDS", 3600),
            s3_endpoint=env.get("AWS_ENDPOINT_URL") or None,
            s3_region=env.get("AWS_REGION") or None,
        )


def _hand_to_clients(env: Mapping[str, str]) -> None:
    """Set the environment of the process, since clients of object stores look only there. Remove empty settings."""
    for name, safe in _SAFE_VALUES.items():
        if env.get(name) and env[name].lower() not in safe:
            raise Refusal(
                f"{name}={env[name]!r} lets a client overwrite files that must only be created, and every lease and "
                "commit relies on such files: remove this setting"
            )
    for name in (name for name in env if name.startswith("AWS_")):
        if env[name]:
            os.environ[name] = env[name]
        else:
            os.environ.pop(name, None)
    if not (env.get("AWS_REGION") or env.get("AWS_ENDPOINT_URL")):
        raise Refusal(
            f"LAKE_ROOT={env['LAKE_ROOT']!r} is in a bucket: set AWS_REGION to its region, or AWS_ENDPOINT_URL to "
            "the address of a store that is not Amazon's"
        )


def binding_conf(settings: Settings) -> dict[str, str]:
    """The configuration that a checkpoint with state must agree with.

    If the number of partitions is not set, the checkpoint decides it, so it is left out here.
    """
    conf = spark_conf(settings)
    if settings.shuffle_partitions is None:
        del conf[_SHUFFLE_PARTITIONS]
    return conf


def class_archive(jars: Path) -> Path:
    """Where the embedded stack keeps Spark's classes, already read and checked. They make a start a third shorter."""
    return jars / "spark.jsa"


def _shared_classes(jars: Path) -> list[str]:
    archive = class_archive(jars)
    # Java silently ignores an archive that does not fit its version.
    return [f'"-XX:SharedArchiveFile={archive}"', "-Xlog:cds=off", "-Xlog:cds+dynamic=off"] if archive.exists() else []


_CREDENTIALS = (
    "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider",
    "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
    "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider",
)
_BY_FILE_SYSTEM = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


def fast_local_files(settings: Settings, *, everywhere: bool = False) -> dict[str, str]:
    """Use a local file system that starts no processes.

    Hadoop's own starts a process (chmod, readlink) for each file and folder that it makes, about thirty in a small
    micro-batch. ``everywhere``: use it also in executors of a cluster, which have its jar at the same path.
    """
    jar = ":".join(map(str, (settings.jars / "spark").glob("hadoop-bare-naked-local-fs-*.jar")))
    return {
        "spark.hadoop.fs.file.impl": "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem",
        # Spark needs this jar before it loads other jars.
        "spark.driver.extraClassPath": jar,
        **({"spark.executor.extraClassPath": jar} if everywhere else {}),
        **_BY_FILE_SYSTEM,
    }


def _object_store(settings: Settings) -> dict[str, str]:
    """How Spark reaches a lake in a bucket, by the same `s3://` address that the other clients use."""
    if isinstance(settings.lake_root, Path):
        return {}
    s3a = "spark.hadoop.fs.s3a"
    # A store that is not Amazon's does not have a host name for each bucket.
    elsewhere = {f"{s3a}.endpoint": settings.s3_endpoint or "", f"{s3a}.path.style.access": "true"}
    return {
        "spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem",
        # The second version would leave marks of folders, which nothing else removes.
        "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "1",
        # First the keys that Spark hands to executors, then all places where the other clients look: a web identity,
        # a role.
        f"{s3a}.aws.credentials.provider": ",".join(_CREDENTIALS),
        **({f"{s3a}.endpoint.region": settings.s3_region} if settings.s3_region else {}),
        **(elsewhere if settings.s3_endpoint else {}),
        **_BY_FILE_SYSTEM,
    }


def spark_conf(settings: Settings) -> dict[str, str]:
    """All settings of Spark, also those that it needs before its JVM starts; for `spark-submit` and by hand."""
    sets = ("spark",) if isinstance(settings.lake_root, Path) else ("spark", "s3")
    jars = [str(jar) for name in sets for jar in sorted((settings.jars / name).glob("*.jar"))]
    if not jars:
        raise Refusal(f"no Spark jars in {settings.jars / 'spark'}: fetch them with `tideline jars`")
    on_one_machine = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        **fast_local_files(settings),
    }
    return {
        "spark.jars": ",".join(jars),
        "spark.driver.memory": settings.driver_memory,
        DRIVER_OPTIONS: " ".join([*JVM_OPTIONS, *_shared_classes(settings.jars)]),
        "spark.ui.showConsoleProgress": "false",
        # Any free port, since several drivers run side by side. Each driver logs its address.
        "spark.ui.port": "0",
        "spark.sql.session.timeZone": "UTC",
        _SHUFFLE_PARTITIONS: str(settings.shuffle_partitions or min(os.cpu_count() or 2, 8)),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # Streams cannot adapt their plans. Unless this is off, they log that at every start.
        "spark.sql.adaptive.enabled": "false",
        # A JSON record that repeats a name is rejected, since it is unclear which value is meant.
        "spark.sql.variant.allowDuplicateKeys": "false",
        # The default of 50 takes most of the time of every commit to a small table.
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        # Spark keeps several files open at once, instead of sorting every batch by its partitions.
        "spark.sql.maxConcurrentOutputFileWriters": "50",
        # Fifty writers with the default row groups of 128 MiB would be too many for the heap.
        "spark.hadoop.parquet.block.size": str(8 * 1024 * 1024),
        "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
        # No reader sees a stage before it is complete, so its files need not be moved twice.
        "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "2",
        # Listing the files of one micro-batch needs no Spark job.
        "spark.sql.sources.parallelPartitionDiscovery.threshold": "1000",
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        **_object_store(settings),
        **(on_one_machine if settings.spark_master.startswith("local") else {}),
    }
