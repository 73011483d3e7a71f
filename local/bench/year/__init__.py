"""A simulated year of 1-minute slices, which shows what grows, and by how much."""
