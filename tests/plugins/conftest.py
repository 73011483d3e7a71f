"""Airflow makes its home the moment it is imported: give it one that nobody else uses."""

import os
import tempfile

os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="airflow-home-")
