"""Java and its jars: found, fetched once, checked, and quick to start."""
