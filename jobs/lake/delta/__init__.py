"""Delta tables with fenced commits, and the care of their logs, old files and small files."""
