"""Made-up traffic for demos, tests and benchmarks."""
