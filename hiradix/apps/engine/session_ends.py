"""Keeps the places in the tree where sessions end, to choose what goes first when pages are short, and what
stays if it can."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hiradix.policy.admission import AdmissionPolicy
from hiradix.policy.continuations import MOST_SESSIONS
from hiradix.prefix_cache import PrefixCache
from hiradix.tree import Node, RadixKey


@dataclass(slots=True)
class _End:
    """The place where a session's last prompt and answer end, `num_tokens` from the root, and whose they are."""

    node: Node
    num_tokens: int
    tenant: str


class SessionEnds:
    """The ends of sessions that an admission policy follows, as many as MOST_SESSIONS. One thread."""

    def __init__(self, policy: AdmissionPolicy, cache: PrefixCache) -> None:
        self._policy = policy
        self._cache = cache
        self._ends: dict[str, _End] = {}  # by session, the one that ended longest ago first
        self._num_at: Counter[Node] = Counter()  # how many end at a node
        self._behind: deque[Node] = deque(maxlen=MOST_SESSIONS)  # ends that their sessions did not go on from
        self._left: dict[str, None] = {}  # sessions that left

    def note(self, session: str, key: RadixKey, tenant: str) -> None:
        """A request of it ended; `key` is its prompt and answer, as far as they are in the cache."""
        found, before = self._cache.find_prefix(key), self._ends.get(session)
        if before is not None and not _is_on_path(before.node, found.node):
            self._behind.append(before.node)
        self._drop_note(session)
        self._ends[session] = _End(found.node, found.device, tenant)
        self._num_at[found.node] += 1
        if len(self._ends) > MOST_SESSIONS:
            self._drop_note(next(iter(self._ends)))

    def _drop_note(self, session: str) -> None:
        """Know no more where the session ends."""
        self._left.pop(session, None)
        end = self._ends.pop(session, None)
        if end is not None:
            self._num_at[end.node] -= 1
            if not self._num_at[end.node]:
                del self._num_at[end.node]

    def is_back(self, session: str) -> None:
        """Note that a session is being served again: it has not left."""
        self._left.pop(session, None)

    def take_left(self) -> None:
        """Note who left, of those whose ends are known: who has none holds nothing, and is not kept here."""
        self._left |= {session: None for session in self._policy.take_left() if session in self._ends}

    # -- when pages are short ---------------------------------------------------------------

    def drop_first(self, num_tokens: int) -> None:
        """Let device tokens go before the eviction policy chooses, so many of them at most: what sessions did
        not go on from, what only those use that left, and what tenants have beyond their share. Where other
        sessions end, nothing goes."""
        short = num_tokens
        while short > 0 and self._behind:
            short -= self._drop_at(self._behind.popleft(), short, 0)
        self.take_left()
        short = self._drop(list(self._left), short)
        while short > 0 and (rich := self._richest()):
            short = self._drop(rich[:1], short)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside, nothing is evicted of what sessions hold that were let in, of tenants that have no more than
        their share; with one tenant nothing is kept. O(pages of their paths)."""
        held = self._held()
        receipts = []
        if len(held) > 1:
            share = self._policy.capacity / len(held)
            receipts = [
                self._cache.inc_lock_ref(self._cache.find_again(end.node))
                for session, end in self._ends.items()
                if held[end.tenant] <= share and self._policy.is_in(session)
            ]
        try:
            yield
        finally:
            for receipt in receipts:
                self._cache.dec_lock_ref(receipt)

    def _drop(self, sessions: Sequence[str], num_tokens: int) -> int:
        """Drop the ends of these sessions in turn until `num_tokens` are freed; the number of tokens still
        short."""
        short = num_tokens
        for session in sessions:
            if short <= 0:
                break
            end = self._ends.get(session)
            dropped = 0 if end is None else self._drop_at(end.node, short, 1)
            if dropped < short:
                self._drop_note(session)
            elif end is not None:
                end.num_tokens -= dropped
            short -= dropped
        return short

    def _drop_at(self, node: Node, num_tokens: int, num_own: int) -> int:
        """Tokens that went. num_own: ends at `node` that may go."""
        if self._num_at[node] > num_own:
            return 0
        return self._cache.drop_tail(node, num_tokens, self._num_at)

    def _held(self) -> dict[str, int]:
        """Tokens that sessions hold which are not being served, by tenant."""
        held: dict[str, int] = {}
        for end in self._ends.values():
            held[end.tenant] = held.get(end.tenant, 0) + end.num_tokens
        return held

    def _richest(self) -> list[str]:
        """Sessions of the tenant that has most, if that is more than its share."""
        held = self._held()
        if len(held) < 2:
            return []
        tenant = max(held, key=held.__getitem__)
        if held[tenant] * len(held) <= self._policy.capacity:
            return []
        return [session for session, end in self._ends.items() if end.tenant == tenant]


def _is_on_path(node: Node, end: Node) -> bool:
    """Whether the way from the root to `end` goes through `node`."""
    at: Node | None = end
    while at is not None and at.end > node.end:
        at = at.parent
    return at is node
