"""Examples in docstrings run, and what users call has one."""

from __future__ import annotations

import doctest
import importlib

import pytest

from hiradix.tree import IS_COMPILED
from tests.project.repo import modules

# What users of the library call or write: each has an example in its docstring.
EXPECTED = (
    "hiradix.memory.allocator.SlotAllocator",
    "hiradix.policy.eviction.make_order",
    "hiradix.policy.eviction.register_eviction_policy",
    "hiradix.prefix_cache.build.build_prefix_cache",
    "hiradix.prefix_cache.names.HiRadixCache",
    "hiradix.prefix_cache.names.RadixCache",
    "hiradix.prefix_cache.names.StateRadixCache",
    "hiradix.prefix_cache.names.SWARadixCache",
    "hiradix.storage.opening.open_storage",
    "hiradix.storage.fingerprint.PageFingerprint",
    "hiradix.storage.protocol.StorageBackend",
    "hiradix.storage.registry.register_storage_backend",
    "hiradix.transfer.controller.HiCacheController",
    "hiradix.tree.hashing.hash_pages",
    "hiradix.tree.key.RadixKey",
    "hiradix.tree.log.TokenLog",
    "hiradix.tree.tree.RadixTree",
)
WITH_EXAMPLES = [m.name for m in modules() if ">>> " in m.path.read_text(encoding="utf-8")]

pytestmark = pytest.mark.skipif(IS_COMPILED, reason="compiled functions keep no examples for doctest")


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What examples register is gone again after them."""
    from hiradix.policy import eviction
    from hiradix.storage import registry

    monkeypatch.setattr(eviction, "_REGISTERED", dict(eviction._REGISTERED))
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


def examples_of(name: str) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name), name)
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name: str, registries: None) -> None:
    runner, told = doctest.DocTestRunner(), []
    tests = examples_of(name)
    assert tests
    for test in tests:
        runner.run(test, out=told.append)
    assert runner.failures == 0, "".join(told)


def test_what_users_call_has_an_example() -> None:
    named = {test.name for name in WITH_EXAMPLES for test in examples_of(name)}
    assert set(EXPECTED) - named == set()


def test_an_example_that_is_wrong_fails() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    runner = doctest.DocTestRunner()
    runner.run(test, out=lambda _: None)
    assert runner.failures == 1
