"""The domain: all code about the data. It does not import Airflow."""
