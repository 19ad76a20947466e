"""Grammars and JSON schemas: which tokens fit them."""
