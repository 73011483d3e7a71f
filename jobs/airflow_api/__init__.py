"""Airflow as the command line reaches it."""
