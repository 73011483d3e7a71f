"""Checks -> Great Expectations -> verdict. What is judged here is never changed here."""
