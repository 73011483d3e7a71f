"""How Airflow reaches Kafka, Spark and the lake."""
