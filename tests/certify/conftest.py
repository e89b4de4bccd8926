"""The model of the end-to-end tests."""

from tests.e2e.conftest import tiny_model

__all__ = ["tiny_model"]
