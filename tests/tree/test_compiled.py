"""Which form of the tree the tests run on: `make test-compiled` must not test the Python one."""

from __future__ import annotations

import os

from hiradix.tree import IS_COMPILED, RadixTree
from hiradix.tree.node import Node


def test_the_form_that_was_asked_for_runs() -> None:
    wanted = os.environ.get("HIRADIX_COMPILED") == "1"
    assert IS_COMPILED == wanted
    is_python = hasattr(RadixTree.match, "__code__")
    assert is_python != wanted


def test_nodes_have_no_dictionary() -> None:
    assert not hasattr(Node(None, 0, 0, 0), "__dict__")
