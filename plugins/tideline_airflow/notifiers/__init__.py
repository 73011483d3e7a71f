"""How Airflow tells people what they must know."""
