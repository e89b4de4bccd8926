"""Receipts of locks: each lock is given back once, by its receipt or, where nobody kept that, by its node.

Engines of SGLang's family lock a node and give the node back. They let go of what `inc_lock_ref` returned,
and from then on their lock is counted at its node. So a node is given back as often as it was locked without
a receipt that is still kept, and never in place of a lock whose receipt somebody keeps.
"""

from __future__ import annotations

from hiradix.errors import Misuse
from hiradix.tree import DEVICE, Lock, Node, RadixTree


class LockReceipt:
    """The receipt that `inc_lock_ref` returns and `dec_lock_ref` takes. delta: tokens that became protected,
    negated.

    lock: the tree's, which has no floors once it is given back. cache_locks: of the cache that gave it.
    """

    __slots__ = ("lock", "delta", "cache_locks")

    def __init__(self, lock: Lock, delta: int, cache_locks: LocksByNode):
        self.lock = lock
        self.delta = delta
        self.cache_locks = cache_locks

    def __del__(self) -> None:
        if self.lock.floors and self.lock.node.end:  # a lock on the root protects nothing
            self.cache_locks.let_go.append(self.lock)  # no more: the garbage collector may be in any thread

    def __repr__(self) -> str:
        return f"LockReceipt({self.lock}, {self.delta})"

    def lock_in(self, locks: LocksByNode) -> Lock:
        """The lock, which is of the cache that has `locks` and not given back yet."""
        if self.cache_locks is not locks:
            raise Misuse(f"{self} is of another cache")
        if not self.lock.floors:
            raise Misuse(f"{self.lock} is given back twice")
        return self.lock


class LocksByNode:
    """The locks that are out and whose receipts nobody keeps. Scheduler thread only, but for `let_go`.

    let_go: those not filed under their nodes yet; receipts that end are the writers, in any thread.
    """

    def __init__(self, tree: RadixTree):
        self.let_go: list[Lock] = []
        self._tree = tree
        self._of: dict[Node, list[Lock]] = {}  # a locked node stays the same object: it is never merged away

    def add(self, lock: Lock) -> None:
        """`lock`, of no root, is to be given back by its node."""
        self._of.setdefault(lock.node, []).append(lock)

    def at(self, node: Node) -> Lock:
        """A lock on `node`, to look at. Misuse: none is out."""
        return self._locks_on(node)[-1] if node.end else self._tree.lock(self._tree.root, DEVICE)

    def take(self, node: Node) -> Lock | None:
        """A lock on `node`, to be given back; None at the root. Misuse: none is out. O(1) over time."""
        if not node.end:
            return None
        locks = self._locks_on(node)
        lock = locks.pop()
        if not locks:
            del self._of[lock.node]
        return lock

    def _locks_on(self, node: Node) -> list[Lock]:
        while self.let_go:
            self.add(self.let_go.pop())
        at = self._tree.current(node) or node  # one of before a `reset` has left the tree
        found = self._of.get(at)
        if found is None:
            raise Misuse(
                f"{node} is given back without a receipt, and no lock is out on it whose receipt was let go"
            )
        return found
