"""vLLM's calls of the connector that need no engine: sleep, and what its sources are found to have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hiradix.adapters.probe import installed_sources
from hiradix.adapters.vllm import HiRadixConnector, connector, support
from hiradix.errors import CacheError


class Role:
    """A worker role whose copies end, or do not."""

    def __init__(self, ends: bool) -> None:
        self.ends = ends
        self.calls: list[str] = []

    def after_forward(self, orders: Any) -> None:
        self.calls.append("after_forward")

    def settle(self, timeout_s: float) -> bool:
        assert 0 < timeout_s < float("inf")
        self.calls.append("settle")
        return self.ends


def worker_of(role: Role, settles: bool = False) -> Any:
    one = object.__new__(HiRadixConnector)
    one.worker, one._orders, one._settles = SimpleNamespace(role=role), None, settles
    return one


def test_sleep_waits_for_copies_and_is_refused_while_they_run() -> None:
    role = Role(ends=True)
    worker_of(role).unregister_kv_caches()
    assert role.calls == ["settle"]
    with pytest.raises(CacheError, match=r"vLLM cannot sleep: copies of KV still run after 30 s"):
        worker_of(Role(ends=False)).unregister_kv_caches()
    unregistered = worker_of(role)
    unregistered.worker = None
    unregistered.unregister_kv_caches()


@pytest.mark.parametrize("settles", [False, True])
def test_where_vllm_tells_nobody_of_its_sleep_each_step_waits(settles: bool) -> None:
    role = Role(ends=False)
    worker_of(role, settles).wait_for_save()
    assert role.calls == ["after_forward", *["settle"] * settles]


def test_the_installed_release_has_all_that_is_used() -> None:
    assert support.lacking(installed_sources("vllm")) == ()
    assert support.installed_version().startswith(support.TESTED)
    assert connector.SETTLE_S == 30.0
