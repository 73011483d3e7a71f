"""Delta tables with fenced commits: their log, their old files, their small files."""
