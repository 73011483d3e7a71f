"""SQL over the lake, without Spark."""
