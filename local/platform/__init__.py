"""The embedded platform: a broker and Airflow as processes of one machine."""
