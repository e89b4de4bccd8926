"""A tree driven at random beside a flat page map, which has no structure to get wrong.

`World` has one method per move; each takes a `Draw` (of hypothesis or of a seeded generator), makes its move
on tree and map, and compares. After each move `check` asserts the tree's invariants, exact lock counts, and
that every page id is in exactly one place: free, in the tree, or in copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hiradix.policy.eviction import make_order
from hiradix.tree import Component, DeadLeaf, Granularity, Lock, Node, RadixKey, RadixTree, Tier, hash_pages

DEVICE, HOST = Tier.DEVICE, Tier.HOST
POOL = 150
MAX_PAGES = 8
NAMESPACES = ((None, None), ("adapter", None), (None, "tenant"))
Draw = Callable[[int], int]  # n -> 0 .. n - 1
LEARNING = ("ghd",)  # what leaves teaches it, so the first victim may change which is the second
POLICY_CONFIG = {"tlru": {"threshold": 200, "next_prompt_estimate": 50}}


def components_of(page_size: int, window: str, has_state: bool) -> tuple[Component, ...]:
    """window: none, or its length in tokens against the page's: below, equal, above."""
    found = [Component("full")]
    if window != "none":
        tokens = {"below": max(page_size - 1, 1), "equal": page_size, "above": 3 * page_size}
        found.append(Component("window", reach=-(-tokens[window] // page_size)))
    if has_state:
        found.append(Component("state", reach=1, per_page=False))
    return tuple(found)


@dataclass(frozen=True)
class Config:
    """What one run is about."""

    policy: str = "lru"
    page_size: int = 1
    window: str = "none"  # see `components_of`
    has_state: bool = False
    is_bigram: bool = False
    long_path: int = 16  # 0: merge whenever something is unlocked
    waste: int = 4
    dead_leaf: str = "keep"

    def components(self) -> tuple[Component, ...]:
        return components_of(self.page_size, self.window, self.has_state)


@dataclass(eq=False)
class InFlightCopy:
    """A copy under way: its locks, and per segment the node it ends in, component, pages and page names."""

    locks: list[Lock]
    segments: list[tuple[Node, int, np.ndarray, list[int]]] = field(default_factory=list)


@dataclass(eq=False)
class Hint:
    """A node seen earlier and not locked, the names of its path, and whether its last page has left since."""

    node: Node
    names: list[int]
    is_gone: bool = False


class World:
    """See the module's docstring."""

    def __init__(self, config: Config):
        self.config = config
        self.size = config.page_size
        self.components = config.components()
        order = make_order(config.policy, POLICY_CONFIG.get(config.policy))
        granularity = Granularity(config.long_path, config.waste)
        rule = DeadLeaf(config.dead_leaf)
        self.tree = RadixTree(
            config.page_size, self.components, order=order, granularity=granularity, dead_leaf=rule
        )
        self.names: dict[
            tuple, int
        ] = {}  # (name of the page before, row) -> name of a page and all before it
        pools = [(c, t) for c in range(len(self.components)) for t in Tier]
        self.map: dict[tuple[int, Tier], dict[int, int]] = {p: {} for p in pools}  # name -> page
        self.free = {p: set(range(POOL)) for p in pools}
        self.locks: list[Lock] = []
        self.writes: list[InFlightCopy] = []
        self.loads: list[InFlightCopy] = []
        self.hints: list[Hint] = []
        self.promises: list[tuple[Lock, list[int], list[Tier]]] = []  # locks, and what they keep usable where

    # -- keys and pages ---------------------------------------------------------------------

    def key(self, draw: Draw) -> RadixKey:
        """A new key over few different pages, or the start or a continuation of an earlier one."""
        pages = [draw(2) for _ in range(1 + draw(MAX_PAGES))]
        extras = [(None, b"image-a", b"image-b")[draw(3)] for _ in pages] if draw(6) == 0 else None
        tokens = np.zeros((len(pages), self.size), np.int64)
        for i, symbol in enumerate(pages):
            tokens[i, (i * 7) % self.size] = symbol << (40 if draw(9) == 0 else 3)
        tail = np.zeros(draw(self.size) + self.config.is_bigram, np.int64)
        flat = np.concatenate([tokens.ravel(), tail])
        extra_key, salt = NAMESPACES[draw(3) if draw(3) == 0 else 0]
        return RadixKey(flat, extra_key, self.config.is_bigram, cache_salt=salt, page_extras=extras)

    def names_of(self, key: RadixKey) -> list[int]:
        """Names of the key's whole pages: equal iff the pages and everything before them are."""
        lookahead = int(key.is_bigram)
        name: object = (key.extra_key, key.cache_salt)
        found = []
        for page in range(len(key) // self.size):
            row = key.tokens[page * self.size : (page + 1) * self.size + lookahead].tobytes()
            name = self.names.setdefault((name, row, key.extra(page)), len(self.names))
            found.append(name)
        return found

    def alloc(self, c: int, t: Tier, n: int) -> np.ndarray:
        free = self.free[c, t]
        return np.array([free.pop() for _ in range(n)], dtype=np.int32)

    def has_room(self) -> bool:
        return all(len(free) > 3 * MAX_PAGES for free in self.free.values())

    def release(self, c: int, t: Tier, pages: np.ndarray) -> None:
        for page in pages.tolist():
            assert page not in self.free[c, t], f"page {page} of component {c} freed twice in {t.name}"
            self.free[c, t].add(page)

    def learn(self, names: list[int], c: int, t: Tier, pages: np.ndarray, duplicates: np.ndarray) -> None:
        """The tree was given `pages` for `names`: exactly what the map lacked must have been taken."""
        refused = set(duplicates.tolist())
        assert len(refused) == len(duplicates)
        for name, page in zip(names, pages.tolist(), strict=True):
            if name in self.map[c, t]:
                assert (page in refused) == (self.map[c, t][name] != page)
            elif c and name not in self.map[0, t]:
                assert page in refused
            else:
                assert page not in refused
                self.map[c, t][name] = page
        self.release(c, t, duplicates)

    def forget(self, freed: list) -> None:
        for drop in freed:
            gone = set(drop.pages.tolist())
            assert len(gone) == len(drop.pages)
            known = self.map[drop.component, drop.tier]
            kept = {name: page for name, page in known.items() if page not in gone}
            assert len(kept) + len(gone) == len(known), "pages that were not resident came out"
            self.map[drop.component, drop.tier] = kept
            self.release(drop.component, drop.tier, drop.pages)
        for hint in self.hints:
            hint.is_gone |= not any(hint.names[-1] in self.map[0, t] for t in Tier)

    # -- the oracle -------------------------------------------------------------------------

    def usable(self, names: list[int], tiers: list[Tier]) -> int:
        """The longest prefix of `names` that ends where every component reaches back far enough."""

        def has(c: int, i: int) -> bool:
            return any(names[i] in self.map[c, t] for t in tiers)

        best = 0
        for end in range(1, len(names) + 1):
            if not has(0, end - 1):
                break
            ok = True
            for c, component in enumerate(self.components[1:], 1):
                first = max(0, end - component.reach) if component.per_page else end - 1
                ok = ok and all(has(c, i) for i in range(first, end))
            best = end if ok else best
        return best

    def match(self, key: RadixKey):
        names = self.names_of(key)
        m = self.tree.match(key)
        assert m.device_node.end == self.usable(names, [DEVICE])
        assert m.loadable_node.end == self.usable(names, [DEVICE, HOST])
        got = self.tree.pages(m.device_node, DEVICE).tolist()
        assert got == [self.map[0, DEVICE][name] for name in names[: m.device_node.end]]
        return m, names

    def promise(self, lock: Lock, names: list[int], tiers: list[Tier]) -> None:
        """From now on `lock` keeps `names` usable, if they are."""
        if self.usable(names, tiers) == len(names):
            self.promises.append((lock, names, tiers))

    def check_promises(self) -> None:
        out = {id(lock) for lock in self.locks}
        self.promises = [p for p in self.promises if id(p[0]) in out]
        for lock, names, tiers in self.promises:
            assert self.usable(names, tiers) == len(names), f"{lock} did not keep what it covers"

    # -- moves --------------------------------------------------------------------------------

    def request(self, draw: Draw) -> None:
        """Match, lock, insert the rest; keep the lock, or give it back."""
        if not self.has_room():
            return
        key = self.key(draw)
        m, names = self.match(key)
        held = self.tree.lock(m.device_node, DEVICE)
        hit, n = m.device_node.end, len(names)
        mine = [self.alloc(0, DEVICE, n - hit)]
        whole = draw(2) == 0  # hand in the hit pages, too
        if whole:
            own = [self.map[0, DEVICE][name] for name in names[:hit]]
            mine[0] = np.concatenate([np.array(own, np.int32), mine[0]])
        for c, component in enumerate(self.components[1:], 1):
            count = draw(n + 1) if component.per_page else draw(2) * (n > 0)
            mine.append(self.alloc(c, DEVICE, count))
        done = self.tree.insert(key, DEVICE, mine, None if whole and draw(2) else held, priority=draw(3))
        for c, (pages, refused) in enumerate(zip(mine, done.duplicates, strict=True)):
            self.learn(names[n - len(pages) :], c, DEVICE, pages, refused)
        assert done.lock.node.end == n
        self.tree.unlock(held)
        self.locks.append(done.lock)
        self.promise(done.lock, names, [DEVICE])
        if draw(3):
            self.tree.unlock(self.locks.pop())

    def look(self, draw: Draw) -> None:
        m, names = self.match(self.key(draw))
        if draw(2):
            self.locks.append(self.tree.lock(m.loadable_node, Tier(draw(2))))
            self.promise(self.locks[-1], names[: m.loadable_node.end], list(Tier))
        self.tree.hit(m.device_node)
        node = m.loadable_node
        if node.end:
            self.hints = [*self.hints[-15:], Hint(node, names[: node.end])]

    def revisit(self, draw: Draw) -> None:
        """Come back with a node seen earlier, which may have been split, merged or dropped since."""
        if not self.hints:
            return
        hint = self.hints[draw(len(self.hints))]
        node, now = hint.node, self.tree.current(hint.node)
        assert (now is None) == hint.is_gone
        if now is None:
            assert not list(self.tree.path(node))
            return
        assert now.end == node.end == len(hint.names)
        assert self.names_of(self.tree.path_key(node)) == hint.names
        floor = draw(node.end)
        part = list(self.tree.path(node, floor))
        assert part[0] is now and part[-1].start == floor
        lock = self.tree.lock(node, Tier(draw(2)))
        assert lock.node is now
        self.locks.append(lock)

    def unlock(self, draw: Draw) -> None:
        if self.locks:
            self.tree.unlock(self.locks.pop(draw(len(self.locks))))

    def evict(self, draw: Draw) -> None:
        c, t, n = draw(len(self.components)), Tier(draw(2)), 1 + draw(6)
        before = self.tree.evictable_pages(t, c)
        nodes = self.tree.coldest(c, t, n)
        expected = [page for node in nodes for page in node.residency(c, t).pages.tolist()]
        freed = self.tree.evict(c, t, n)
        got = [
            page for drop in freed if (drop.component, drop.tier) == (c, t) for page in drop.pages.tolist()
        ]
        assert len(got) >= min(n, before)
        foretold = self.config.policy not in LEARNING and self.config.dead_leaf == "keep"
        if t is DEVICE and foretold:
            assert sorted(got) == sorted(expected), "coldest() foretold other victims"
        self.forget(freed)
        self.check_promises()

    def write_back(self, draw: Draw) -> None:
        """What write-back does: copy the coldest down, then demote exactly those."""
        if not self.has_room():
            return
        for node in self.tree.coldest(0, DEVICE, 1 + draw(4)):
            if self.tree.current(node) is None:
                continue  # a dead leaf, which left with one before
            if not node.resident(HOST):
                pages = self.alloc(0, HOST, node.num_pages)
                names = self.names_of(self.tree.path_key(node))[node.start :]
                self.learn(names, 0, HOST, pages, self.tree.adopt(node, 0, HOST, pages))
            freed = self.tree.demote(node)
            kept = node.resident(HOST) or self.config.dead_leaf != "keep"
            assert freed and not node.resident(DEVICE) and kept
            self.forget(freed)
        self.check_promises()

    def demote(self, draw: Draw) -> None:
        """Any node: its device copy goes iff it has a host copy, no lock and no device children."""
        nodes = list(self.tree.nodes())
        if not nodes:
            return
        node = nodes[draw(len(nodes))]
        alone = not any(child.resident(DEVICE) for child in node.children.values())
        able = node.resident(DEVICE) and node.resident(HOST) and not node.device.lock_ref and alone
        freed = self.tree.demote(node)
        assert bool(freed) == able
        self.forget(freed)
        self.check_promises()

    def begin_write(self, draw: Draw) -> None:
        if not self.has_room():
            return
        node = self.match(self.key(draw))[0].device_node
        copy = InFlightCopy([self.tree.lock(node, DEVICE)])
        if draw(2):
            copy.locks.append(self.tree.lock(node, HOST))
        self._segments(copy, node, DEVICE, HOST)
        self.writes.append(copy)

    def _segments(self, copy: InFlightCopy, node: Node, source: Tier, target: Tier) -> None:
        for s in self.tree.missing(node, source, target):
            names = self.names_of(self.tree.path_key(s.node))
            per_page = self.components[s.component].per_page
            pages = self.alloc(s.component, target, len(s.pages))
            copy.segments.append((s.node, s.component, pages, names[s.start :] if per_page else names[-1:]))

    def finish_write(self, draw: Draw) -> None:
        if not self.writes:
            return
        copy = self.writes.pop(draw(len(self.writes)))
        ok = draw(4) > 0
        for node, c, pages, names in copy.segments:
            if ok:
                self.learn(names, c, HOST, pages, self.tree.adopt(node, c, HOST, pages))
            else:
                self.release(c, HOST, pages)
        for lock in copy.locks:
            self.tree.unlock(lock)

    def begin_load(self, draw: Draw) -> None:
        """Load back: device pages enter the tree at once; what is needed is locked in both tiers."""
        if not self.has_room():
            return
        node = self.match(self.key(draw))[0].loadable_node
        copy = InFlightCopy([self.tree.lock(node, HOST), self.tree.lock(node, DEVICE)])
        self._segments(copy, node, HOST, DEVICE)
        for n, c, pages, names in copy.segments:
            refused = self.tree.adopt(n, c, DEVICE, pages)
            assert not len(refused)
            self.learn(names, c, DEVICE, pages, refused)
        self.loads.append(copy)
        assert self.tree.match(self.tree.path_key(node)).device_node.end == node.end

    def finish_load(self, draw: Draw) -> None:
        if not self.loads:
            return
        copy = self.loads.pop(draw(len(self.loads)))
        for lock in copy.locks:
            self.tree.unlock(lock)
        tops = [s[0] for s in copy.segments if s[1] == 0]
        if draw(4) == 0 and tops:
            freed = self.tree.drop_device(tops[0])
            if freed is not None:
                self.forget(freed)
                assert not tops[0].resident(DEVICE)

    def prefetch(self, draw: Draw) -> None:
        """Host pages below the deepest loadable node."""
        if not self.has_room():
            return
        key = self.key(draw)
        m, names = self.match(key)
        anchor = m.loadable_node
        while not draw(3) and anchor.parent is not None:
            anchor = anchor.parent
        lock = self.tree.lock(anchor, HOST)
        present = 0
        while present < len(names) and any(names[present] in self.map[0, t] for t in Tier):
            present += 1
        end = draw(len(names) + 1)
        end = max(end, anchor.end)
        start = min(anchor.end, present)
        pages = [self.alloc(0, HOST, end - start)]
        done = self.tree.insert(key.head(end, self.size), HOST, pages, lock)
        self.learn(names[start:end], 0, HOST, pages[0], done.duplicates[0])
        self.tree.unlock(lock)
        self.locks.append(done.lock)
        if draw(3):
            self.tree.unlock(self.locks.pop())

    def drop(self, draw: Draw) -> None:
        """Take an unlocked subtree out."""
        nodes = [n for n in self.tree.nodes() if not self._is_locked(n)]
        if nodes and draw(4) == 0:
            node = nodes[draw(len(nodes))]
            self.forget(self.tree.drop(node))
            assert node.parent is None

    def _is_locked(self, node: Node) -> bool:
        return any(node.residency(c, t).lock_ref for c in range(len(self.components)) for t in Tier)

    def hash(self, draw: Draw) -> None:
        """Hash what a worker would, from wherever the chain is known, and note it."""
        nodes = list(self.tree.nodes())
        if not nodes:
            return
        node = nodes[draw(len(nodes))]
        start = draw(node.end + 1)
        rows = self.tree.page_rows(node, start)
        assert rows.start <= start and len(rows.rows) == node.end - rows.start
        digests = hash_pages(rows)
        key = self.tree.path_key(node)
        fresh = RadixTree(self.size)
        chain = hash_pages(fresh.rows(key, fresh.root, 0, node.end))
        assert digests == chain[rows.start :]
        assert hash_pages(self.tree.rows(key, node, start, node.end)) == digests
        if start < node.end and draw(2):
            self.tree.set_hashes(node, rows.start, digests)
            assert self.tree.hashes(node) == chain[node.start :]

    def clear(self, draw: Draw) -> None:
        if draw(10):
            return
        old = list(self.locks)
        self.forget(self.tree.clear())
        self.locks.clear()
        self.hints.clear()
        for copy in self.writes:
            for _, c, pages, _ in copy.segments:
                self.release(c, HOST, pages)
        self.writes.clear()
        self.loads.clear()
        for lock in old:
            self.tree.unlock(lock)  # void

    MOVES = {
        "request": 30, "look": 8, "revisit": 8, "unlock": 12, "evict": 12, "write_back": 4, "begin_write": 8,
        "demote": 3, "drop": 3, "finish_write": 8, "begin_load": 6, "finish_load": 6, "prefetch": 8,
        "hash": 5, "clear": 1,
    }  # fmt: skip

    # -- checks -----------------------------------------------------------------------------

    def outstanding(self) -> list[Lock]:
        return self.locks + [lock for f in self.writes + self.loads for lock in f.locks]

    def check(self) -> None:
        self.tree.check(self.outstanding())
        flying = [seg for copy in self.writes for seg in copy.segments]
        for (c, t), pages in self.map.items():
            resident = set(pages.values())
            assert len(resident) == len(pages) == self.tree.resident_pages(t, c)
            in_flight = {p for _, sc, ps, _ in flying if t is HOST and sc == c for p in ps.tolist()}
            assert not resident & self.free[c, t] and not in_flight & (resident | self.free[c, t])
            assert len(resident) + len(self.free[c, t]) + len(in_flight) == POOL, "a page leaked"

    def drain(self) -> None:
        """Everything given back: the tree empties, nothing stays pinned."""
        for copy in self.writes:
            for _, c, pages, _ in copy.segments:
                self.release(c, HOST, pages)
        for lock in self.outstanding():
            self.tree.unlock(lock)
        self.locks, self.writes, self.loads = [], [], []
        for t in Tier:
            for c in range(len(self.components)):
                assert self.tree.protected_pages(t, c) == 0, "something stayed pinned"
        for t in Tier:
            self.forget(self.tree.evict(0, t, 10**6))
        assert not self.tree.root.children, "something was left behind"
        self.check()
