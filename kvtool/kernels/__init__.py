"""Compiled loops over rows and cells."""
