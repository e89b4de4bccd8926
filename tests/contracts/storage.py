"""The conformance suite of storage backends, installed with the package, under its name in the tests."""

import pytest

pytest.register_assert_rewrite("hiradix.testing.storage")

from hiradix.testing.storage import *  # noqa: E402, F403
