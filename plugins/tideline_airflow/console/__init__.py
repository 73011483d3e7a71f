"""Pages inside Airflow: behind its login, for those who may see the DAG."""
