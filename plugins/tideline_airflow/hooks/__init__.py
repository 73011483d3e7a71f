"""Hooks: clients for Kafka and for Airflow's API, made from Airflow connections."""
