"""Checks -> Great Expectations -> verdict. This code never changes the data that it judges."""
