"""The peer's wheel has to be unpacked: `make test-differential` does it."""

from __future__ import annotations

import pytest

from tests.differential.install import FOLDER


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not FOLDER.is_dir():
        skip = pytest.mark.skip(reason="SGLang's wheel is not there: make test-differential")
        for item in items:
            if "tests/differential/" in item.path.as_posix():
                item.add_marker(skip)
