"""Streams: their jobs, their drivers, and how they start, stop and are reset."""
