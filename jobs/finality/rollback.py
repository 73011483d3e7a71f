"""Roll-back: the rows of an earlier version of a slice are published again, as a new version."""

from dataclasses import replace

import pyarrow as pa

from jobs.control.writing import writing
from jobs.failpoints import FailPoint, may_fail_at
from jobs.finality.publishing import announce, keep_replaced_windows
from jobs.finality.run.folder import RunFolder
from jobs.lake.columns import checksum
from jobs.lake.final import FinalTable
from jobs.lake.pipeline_lake import PipelineLake
from jobs.lake.publication import Publication
from jobs.lake.slices import ROLLED_BACK, Header
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings, KeptDays
from jobs.storage.folders import Folder
from jobs.storage.parquet import write


def roll_back(
    lake: PipelineLake, kafka: KafkaSettings, slice_: str, version: int, *, run: str, reason: str, by: str, now_ms: int
) -> Header:
    """Publish the rows of an earlier version again, as a new version. ``now_ms``: by the broker's clock."""
    pipeline = lake.pipeline
    with writing(lake.root, pipeline.recompute_job) as lease:
        final, ledger = lake.open_final(), lake.open_ledger()
        now = final.header(slice_)
        old, rows = earlier(lake, final, slice_, version)
        if now is None or now.version == version:
            raise Refusal(f"slice {slice_} of {pipeline.name!r} is at version {version} already: nothing to roll back")
        header = replace(
            old,
            version=now.version + 1,
            as_of_ms=now_ms,
            run=run,
            verdict=f"{ROLLED_BACK} to version {version}",
            reason=f"rolled back to version {version} by {by}: {reason}",
        )
        keep_replaced_windows(lake, final, now, run)
        with final.staged() as stage:
            files = _stage_again(stage, header, rows)
            lease.check()
            final.publish([Publication(header=header, files=files)])
        may_fail_at(FailPoint.PUBLISHED, 0)
        announce(lake, kafka, final, ledger, lease, {slice_}, now_ms)
    lake.incidents().close_blocked(pipeline.name, [slice_])
    RunFolder.of(lake, run).end()
    return header


def earlier(lake: PipelineLake, final: FinalTable, slice_: str, version: int) -> tuple[Header, pa.Table]:
    """Return the header and rows of a version of a slice. Refused if the table's log no longer has the version."""
    pipeline, table_version = lake.pipeline, final.table_version_with(slice_, version)
    then = lake.final(table_version) if table_version is not None else None
    header = then.header(slice_) if then else None
    if then is None or header is None or header.version != version:
        raise Refusal(
            f'version {version} of slice {slice_} of {pipeline.name!r} is not there: `tideline query "select slice, '
            f'version, as_of from ledger_{pipeline.name}"` lists the versions; those that were replaced are kept for '
            f"FINAL_VERSIONS_KEPT_DAYS={KeptDays.from_env().final_versions} days"
        )
    rows = then.rows(slice_)
    # If the columns have changed since this version was published, the checksum over today's columns is another one.
    same = then.has_columns_of_now(slice_)
    return header if same else replace(header, checksum=checksum(pipeline, rows)), rows


def _stage_again(stage: Folder, header: Header, rows: pa.Table) -> tuple[Folder, ...]:
    if not rows.num_rows:
        return ()
    time_ = pa.scalar(header.as_of_ms * 1000, pa.timestamp("us", tz="UTC"))
    more = {"version": pa.scalar(header.version, pa.int64()), "as_of": time_, "run": pa.scalar(header.run)}
    for name, value in {**more, "fingerprint": pa.scalar(header.fingerprint)}.items():
        rows = rows.append_column(name, pa.array([value.as_py()] * rows.num_rows, value.type))
    file = stage / f"slice={header.slice}" / "rows.parquet"
    write(rows, file)
    return (file,)
