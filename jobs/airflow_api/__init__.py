"""Airflow's REST API, as the command line uses it."""
