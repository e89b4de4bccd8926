"""The tables of the docs that are made from the code are those of today's code."""

from __future__ import annotations

import pytest

from hiradix.apps.configure.example import example_toml
from tests.project.generated import DOCS, EXAMPLE, PAGES, page


@pytest.mark.parametrize("name", PAGES)
def test_the_page_has_the_tables_of_today(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == page(name), "run python -m tests.project.generated"


def test_the_file_of_all_settings_is_that_of_today() -> None:
    assert EXAMPLE.read_text(encoding="utf-8") == example_toml(), "run python -m tests.project.generated"
