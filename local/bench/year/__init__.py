"""A year of 1-minute slices, simulated: what grows, and by how much."""
