"""The domain: all that is true of the data, nothing of Airflow."""
