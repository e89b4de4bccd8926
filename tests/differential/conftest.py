"""The peers' wheels have to be unpacked: `make test-differential` does it."""

from __future__ import annotations

import pytest

from tests.differential.wheels import folders


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not all(folder.is_dir() for folder in folders()):
        skip = pytest.mark.skip(reason="SGLang's wheels are not there: make test-differential")
        for item in items:
            if "tests/differential/" in item.path.as_posix():
                item.add_marker(skip)
