"""What a slice says of itself, and the tables of the lake: one module per table."""
