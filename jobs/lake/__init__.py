"""The tables of the lake: one module per table, and queries over all of them."""
