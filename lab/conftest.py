"""Fixtures of tests/ that the laboratory's tests use too."""

from tests.conftest import smollm2, tiny_model

__all__ = ["smollm2", "tiny_model"]
