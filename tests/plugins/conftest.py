"""Airflow makes its home folder when it is imported, so the tests give it a folder of their own."""

import os
import tempfile

os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="airflow-home-")
