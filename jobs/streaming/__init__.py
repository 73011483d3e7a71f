"""Streams: their jobs, their drivers, how they start, stop and are reset."""
