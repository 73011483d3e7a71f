"""Triggers: what the triggerer waits for."""
