"""The upkeep of documents, pages, folders and logs beside the tables, as a task."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from airflow.sdk import BaseOperator, Context, conf

from jobs.settings import KeptDays, Settings
from tideline_airflow.links import driver_logs
from tideline_airflow.listeners import RUN_NOTE, RUN_NOTE_LENGTH

if TYPE_CHECKING:
    from jobs.upkeep.logs import Removed

_DAY_SECONDS = 24 * 3600.0


class UpkeepOperator(BaseOperator):
    """Removes old documents and files from the lake, and old logs of this platform from this machine."""

    def execute(self, context: Context) -> None:
        """Remove them, and report how much was removed, in the log and on the run."""
        from jobs.upkeep.old_files import look_after

        kept = KeptDays.from_env()
        found = [*look_after(Settings.from_env().lake_root, kept), *self._logs(kept)]
        for removed in found:
            self.log.info("%s", removed)
        note = "\n\n".join(str(removed) for removed in found if removed.files) or "There was nothing to remove."
        context["ti"].xcom_push(RUN_NOTE, note[:RUN_NOTE_LENGTH])

    def _logs(self, kept: KeptDays) -> "list[Removed]":
        from jobs.upkeep import logs

        home, drivers = os.environ.get("TIDELINE_HOME"), driver_logs("")
        tasks = drivers.parent
        if not home or not tasks.resolve().is_relative_to(Path(home).resolve()):
            self.log.info("logs are not removed from %s, since this folder is not below TIDELINE_HOME", tasks)
            return []
        processor = Path(conf.get("logging", "dag_processor_child_process_log_directory"))
        of_drivers = list(drivers.iterdir()) if drivers.is_dir() else []
        old = [logs.discard_old(folder, kept.logs * _DAY_SECONDS) for folder in (tasks, processor)]
        return [*old, logs.trim(Path(home) / "logs", *of_drivers)]
