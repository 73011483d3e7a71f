"""Triggers: tasks wait with them in the triggerer, without a worker slot."""
