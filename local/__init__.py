"""The embedded stack: a broker, Airflow and the jars on one machine, without containers."""
