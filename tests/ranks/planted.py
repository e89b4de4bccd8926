"""Known ways to let ranks drift apart. Each must be caught by the ranks' stories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hiradix.cache import core
from hiradix.cache.agreement import Agreement
from hiradix.policy import eviction
from tests.seeds import assert_seen


def _own_results(self: Agreement, results: Any, ok: bool) -> Any:
    """Apply what has come here, and let the others see to themselves."""
    own = list(results)
    for result in own:
        self._held[result.ticket] = result
    _, agreed = _EXCHANGE(self, (), ok)
    self._held.clear()
    return own, agreed


def _arrival_order(self: Agreement, results: Any, ok: bool) -> Any:
    """Apply the common results in the order they came in on this rank."""
    results = list(results)
    arrived = [*self._held, *(result.ticket for result in results)]
    common, agreed = _EXCHANGE(self, results, ok)
    return sorted(common, key=lambda result: arrived.index(result.ticket)), agreed


def _own_ok(self: Agreement, results: Any, ok: bool) -> Any:
    return _EXCHANGE(self, results, ok)[0], ok


def _only_with_news(self: Any, ok: bool) -> bool:
    """A collective call in a branch that depends on this rank's own progress."""
    if not self.controller._job_table._outbox and self._ranks is not None and self._ranks.num_exchanges:
        return ok
    return _APPLY(self, ok)


def _own_share(name: str) -> Any:
    """One shared number, given by the function it comes from, is read from this rank instead."""

    def share(self: Agreement, source: Any) -> Any:
        shared = _SHARE(self, source)
        return source if source.__name__ == name else shared

    return share


def _attach_alone(self: Any, storage: Any) -> None:
    settled = self.settle
    self.settle = lambda ok=True: settled(True) and ok
    try:
        _ATTACH(self, storage)
    finally:
        del self.settle


def _by_own_pages(node: Any, use: Any) -> int:
    """An order by page ids, which are a rank's own."""
    pages = node.device.pages if node.host.pages is None else node.host.pages
    return int(pages[0])


_EXCHANGE = Agreement.exchange
_SHARE = Agreement.share
_APPLY = core.HierarchicalCache._apply
_ATTACH = core.HierarchicalCache.attach_storage
PLANTED: dict[str, tuple[str, Any]] = {
    "own results": ("hiradix.cache.agreement.Agreement.exchange", _own_results),
    "arrival order": ("hiradix.cache.agreement.Agreement.exchange", _arrival_order),
    "own outcome of a wait": ("hiradix.cache.agreement.Agreement.exchange", _own_ok),
    "own page counts": ("hiradix.cache.agreement._cut", lambda own, outcome: own),
    "own clock": ("hiradix.cache.agreement.Agreement.share", _own_share("own_clock")),
    "own speeds": ("hiradix.cache.agreement.Agreement.share", _own_share("speed")),
    "own fixed costs": ("hiradix.cache.agreement.Agreement.share", _own_share("<lambda>")),
    "own load failures": ("hiradix.cache.agreement.Agreement.share", _own_share("_find_failed_slot")),
    "own host pool": ("hiradix.cache.core._common_pages", lambda host, agree: host.pages),
    "exchange only with news": ("hiradix.cache.core.HierarchicalCache._apply", _only_with_news),
    "own page ids": ("hiradix.policy.eviction._SIMPLE", {**eviction._SIMPLE, "lfu": _by_own_pages}),
    "attach alone": ("hiradix.cache.core.HierarchicalCache.attach_storage", _attach_alone),
}


def assert_caught(name: str, play: Callable[[int], Any], num_seeds: int) -> None:
    """The fault of that name is seen by one of the seeds of `play`, which says how to replay it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*PLANTED[name])
        assert_seen(play, range(num_seeds), match="replay with play")
