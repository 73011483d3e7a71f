"""Operators: the work of the tasks."""
