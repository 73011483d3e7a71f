"""Alerts: incidents from failures, and the channels that carry their messages."""
