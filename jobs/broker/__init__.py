"""Kafka: its connections, its topics, its clock, and how Spark reads and writes it."""
