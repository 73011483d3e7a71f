"""Pages inside Airflow, behind its login. Only users who may see a DAG see the pages about it."""
