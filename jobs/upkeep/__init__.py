"""Removes what nobody needs any more, beside the tables."""
