"""Removes logs, documents and files beside the tables that are not needed any more."""
