"""Caches of a loaded model: contexts that decode into them, their archive, and their state."""
