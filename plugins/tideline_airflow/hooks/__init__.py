"""Hooks: how tasks reach the world."""
