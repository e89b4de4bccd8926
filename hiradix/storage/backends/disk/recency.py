"""When pages were used, so that a long chain is evicted from its end, not from its head.

A chain longer than one call comes as several, head first. Calls of one kind that follow each other on a
thread within a moment are taken for one use of one chain: each page counts as used a little before the page
in front of it. Wrong guesses cost nothing: those pages were used in the same moment.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from hiradix.storage.backends.disk.record import Name

Uses = list[tuple[Name, int]]
"""Names and when they count as used (ns), coldest first."""

MOMENT_NS = 1_000_000_000
MIN_CALL_PAGES = 16
"""A shorter call has nothing behind it."""
MAX_CALLS = 32


@dataclass(eq=False)
class _Chain:
    began_ns: int
    last_ns: int
    calls: list[Sequence[Name]] = field(default_factory=list)
    num_pages: int = 0

    def uses(self) -> Uses:
        rank = self.num_pages
        found: Uses = []
        for call in reversed(self.calls):
            for name in reversed(call):
                rank -= 1
                found.append((name, self.began_ns - rank))
        return found


class Recency:
    """Chains under way, by thread and kind of call. `later` and `settle` are for one thread at a time."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._waiting: dict[_Chain, None] = {}  # in order of their last calls
        self.num_waiting = 0

    def used(self, kind: str, names: Sequence[Name], now_ns: int) -> Uses:
        """What counts as used by a call: `names`, from the last to the first, then what they continue."""
        return self._extended(kind, names, now_ns).uses()

    def later(self, kind: str, names: Sequence[Name], now_ns: int) -> None:
        """The same, to be had from `settle`: a chain of many calls is then gone through once, not each time."""
        chain = self._extended(kind, names, now_ns)
        self._waiting.pop(chain, None)
        self._waiting[chain] = None
        self.num_waiting += len(names)

    def stamps(self, kind: str, names: Sequence[Name], now_ns: int) -> Uses:
        """What `names` alone count for; what they continue counts for the same as before."""
        chain = self._extended(kind, names, now_ns)
        first_ns = chain.began_ns - (chain.num_pages - len(names))
        return [(name, first_ns - at) for at, name in enumerate(names)][::-1]

    def settle(self) -> Uses:
        """What the calls since the last time count for, in an order that is the same as one by one."""
        chains, self._waiting, self.num_waiting = self._waiting, {}, 0
        return [use for chain in chains for use in chain.uses()]

    def _extended(self, kind: str, names: Sequence[Name], now_ns: int) -> _Chain:
        """The chain that a call continues, or begins."""
        chain: _Chain | None = getattr(self._local, kind, None)
        follows = (
            chain is not None
            and 0 <= now_ns - chain.last_ns < MOMENT_NS
            and len(chain.calls[-1]) >= MIN_CALL_PAGES
            and len(chain.calls) < MAX_CALLS
        )
        if chain is None or not follows:
            chain = _Chain(now_ns, now_ns)
            setattr(self._local, kind, chain)
        chain.calls.append(names)
        chain.last_ns = now_ns
        chain.num_pages += len(names)
        return chain
