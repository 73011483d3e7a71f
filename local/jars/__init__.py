"""Java and its jars: find Java, fetch the jars once, check them, and make the start of Spark quick."""
