"""What the laboratory's tests need: those of tests/conftest.py that they use."""

from tests.conftest import tiny_model

__all__ = ["tiny_model"]
