"""Kafka: how to reach it, its topics, its clock, and how Spark reads and writes it."""
