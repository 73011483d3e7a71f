"""The records about a slice, and the tables of the lake: one module per table."""
