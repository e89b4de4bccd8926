"""Storage below a cache of several components: a store for each, that outlives caches and loses pages.

What is put must be what its name says, in every component. What a prefetch brings is read back as everything
is; and where nothing went wrong, it must bring the longest prefix that ends in what storage has of them all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hiradix.cache.agreement import Agree
from hiradix.cache.boundaries import BoundaryReads
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.storage.guard.breaker import NO_TROUBLES
from hiradix.transfer import JobKind
from hiradix.tree import Node, RadixKey, Tier, hash_pages
from tests.cache.component_world import HOST, ComponentWorld, Draw, Setup
from tests.cache.test_components import MAX_LENGTH, Player

Check = Callable[[int, str, np.ndarray], None]


class Depot:
    """Pages by component and name. faults: chance that a call goes wrong."""

    def __init__(self, num_components: int, rng: random.Random):
        self.pages: list[dict[str, np.ndarray]] = [{} for _ in range(num_components)]
        self.rng = rng
        self.faults = 0.0
        self.has_lost = False
        self.damaged: set[tuple[int, str]] = set()  # component, name: there, and not to be read
        self.puts: list[tuple[int, int]] = []  # component, pages
        self.gets: list[tuple[int, int]] = []
        self.on_put: Callable[[Part, Sequence[str]], list[bool] | None] = lambda part, keys: None
        self.on_get: Callable[[Part, Sequence[str]], None] = lambda part, keys: None

    def goes_wrong(self) -> bool:
        return self.rng.random() < self.faults

    def lose(self, share: float) -> None:
        """What a store with other users forgets: any page of any component."""
        for component, shelf in enumerate(self.pages):
            for name in [name for name in shelf if self.rng.random() < share]:
                self.lose_page(component, name)

    def clear(self) -> None:
        """Forget every page."""
        for shelf in self.pages:
            shelf.clear()

    def lose_page(self, component: int, name: str) -> None:
        self.has_lost = True
        del self.pages[component][name]


class Part:
    """One component's guarded store."""

    wants_computed, troubles, num_adopted = False, NO_TROUBLES, 0

    def __init__(self, depot: Depot, component: int, check: Check):
        self.shelf, self.depot, self.component, self.check = depot.pages[component], depot, component, check

    def exists(self, keys: Sequence[str]) -> Any:
        if self.depot.goes_wrong():
            return self.depot.rng.choice([len(keys), 0, 0])  # too much is found out when it is read
        return next((i for i, key in enumerate(keys) if key not in self.shelf), len(keys))

    def get(self, keys: Sequence[str], into: Sequence[Sequence[memoryview]]) -> list[bool]:
        gone = self._gone()
        ok = []
        self.depot.gets.append((self.component, len(keys)))
        self.depot.on_get(self, keys)
        for key, (view,) in zip(keys, into, strict=True):
            is_lost = gone() or (self.component, key) in self.depot.damaged
            data = None if is_lost else self.shelf.get(key)
            view[:] = b"\x7f" * len(view) if data is None else data.tobytes()
            ok.append(data is not None)
        return ok

    def put(self, keys: Sequence[str], pages: Sequence[Sequence[memoryview]]) -> list[bool]:
        gone = self._gone()
        ok: list[bool] = []
        self.depot.puts.append((self.component, len(keys)))
        forced = self.depot.on_put(self, keys)
        for key, (view,) in zip(keys, pages, strict=True):
            ok.append(not gone() if forced is None else forced[len(ok)])
            data = np.frombuffer(bytes(view), np.int64)
            self.check(self.component, key, data)
            if ok[-1]:
                self.shelf.setdefault(key, data)
        return ok

    def _gone(self) -> Callable[[], bool]:
        """Whether the next page of a call fails; raises where the call does."""
        if not self.depot.goes_wrong():
            return lambda: False
        if self.depot.rng.random() < 0.3:
            raise OSError("injected: storage")
        return lambda: self.depot.rng.random() < 0.3


class Storage:
    """What a cache attaches."""

    def __init__(self, parts: Sequence[Part]):
        self.parts = tuple(parts)
        self.num_closed = 0

    def close(self, timeout_s: float = 5.0) -> None:
        self.num_closed += 1


class StoredWorld(ComponentWorld):
    """A `ComponentWorld` over a depot."""

    def __init__(self, setup: Setup, seed: int, agree: Agree | None = None):
        super().__init__(setup, seed, agree)
        self.depot = Depot(len(self.components), random.Random(self.rng.random()))
        self.name_of: dict[str, int] = {}
        self.waiting: list[int] = []
        self.num_asked = self.num_ends = self.num_beside = 0
        self.puts, self.gets = self.depot.puts, self.depot.gets
        self.attach()

    def attach(self) -> None:
        parts = [Part(self.depot, c, self._check_put) for c in range(len(self.components))]
        self.cache.attach_storage(Storage(parts))  # type: ignore[arg-type]

    def restart(self) -> None:
        """Device and host are empty, storage is what it was."""
        self.cache.reset()

    def _check_put(self, c: int, key: str, data: np.ndarray) -> None:
        want = self.name_of[key] * 10 + c
        assert (data == want).all(), f"{self.components[c].name}: {data} under the name of {want}"

    def key(self, draw: Draw, start: RadixKey | None = None, limit: int = 7) -> RadixKey:
        made = super().key(draw, start, limit)
        self.hashes(made)
        return made

    def hashes(self, key: RadixKey) -> list[str]:
        """Storage's names of the key's pages; from here on a store may have them."""
        rows = self.tree.rows(key, self.tree.root, 0, len(key) // self.size)
        found = [digest.hex() for digest in hash_pages(rows)]
        self.name_of.update(zip(found, self.names_of(key), strict=True))
        return found

    # -- prefetch -------------------------------------------------------------------------

    def set_policy(self, name: str) -> None:
        assert self.cache.prefetcher is not None
        limits = PrefetchLimits(self.size, threshold_tokens=1, capacity_share=1.0)
        self.cache.prefetcher.policy = PrefetchPolicy.from_name(name, limits)

    def set_step(self, num_pages: int) -> None:
        """How far apart boundaries on the way are."""
        assert self.cache.prefetcher is not None
        assert isinstance(self.cache.prefetcher.reads, BoundaryReads)
        self.cache.prefetcher.reads.step_pages = num_pages

    def prefetch(self, key: RadixKey) -> int:
        """Ask for what no tier has of `key`; the handle."""
        prefetcher = self.cache.prefetcher
        assert prefetcher is not None
        self.num_asked += 1
        prefetcher.start(self.num_asked, key, self.cache.match(key).loadable_node)
        return self.num_asked

    def stored_end(self, key: RadixKey, start: int) -> int:
        """Where the longest prefix ends, of what the host has room for, that storage has the windows of; and,
        where no tier has them, the pages. Also where only the device has them, beside windows that are read:
        these lie on the host next to pages alone."""
        there = self.tree.find(key)
        lock = self.tree.lock(there, HOST)
        names, shelves = self.hashes(key)[: there.end + self.cache.supply.host_room()], self.depot.pages
        self.tree.unlock(lock)
        hits = next((n for n in range(there.end, len(names)) if names[n] not in shelves[0]), len(names))
        for end in range(hits, start, -1):
            if all(
                names[page] in shelf
                for kind, shelf in zip(self.components[1:], shelves[1:])
                for page in range(max(start, end - kind.reach), end)
            ) and all(names[page] in shelves[0] for page in self._read_again(there, start, end)):
                return end
        return start

    def _read_again(self, there: Node, start: int, end: int) -> range:
        """Pages that a tier has, and that a boundary at `end` takes from storage all the same."""
        path = self.tree.path(there)
        on_host = {page for n in path if n.resident(HOST) for page in range(n.start, n.end)}
        lacking = min([end, *self._lacking(self._in_tiers(there), start, end)])
        first = next((page for page in range(lacking, min(end, there.end)) if page not in on_host), end)
        return range(first, end)

    def _in_tiers(self, there: Node) -> list[set[int]]:
        """Of each component the pages of a path that some tier has; a record is its node's last page."""
        found: list[set[int]] = []
        for c, kind in enumerate(self.components):
            ours = [n for n in self.tree.path(there) if any(n.resident(tier, c) for tier in Tier)]
            spans = [range(n.start if kind.per_page else n.end - 1, n.end) for n in ours]
            found.append({page for span in spans for page in span})
        return found

    def _lacking(self, known: Sequence[set[int]], start: int, end: int) -> list[int]:
        """Pages of further components that a boundary at `end` takes beside those known."""
        reaches = [kind.reach if kind.per_page else 1 for kind in self.components[1:]]
        return [
            page
            for reach, pages in zip(reaches, known[1:], strict=True)
            for page in range(max(start, end - reach), end)
            if page not in pages
        ]

    def fetch_in_peace(self, key: RadixKey) -> None:
        """With nothing else under way, a prefetch brings exactly what the rule says that can be had."""
        cache, prefetcher = self.cache, self.cache.prefetcher
        assert prefetcher is not None
        self.settle()
        self.check_hints()
        start = cache.match(key).loadable_node.end
        is_attached = self.controller.storage_attached
        want = self.stored_end(key, start) if is_attached else start
        refused, gets = dict(cache.counters.unfulfilled), len(self.gets)
        there = self.tree.find(key)
        last, known = there.end, self._in_tiers(there)
        self.set_policy("wait_complete")
        handle = self.prefetch(key)
        while not prefetcher.progress(handle):
            assert self.driver.step(), "the prefetch waits for nothing"
            cache.tick()
        end = cache.match(key).loadable_node.end
        self.read_loadable(key, cache.match(key).loadable_node)
        if cache.counters.unfulfilled == refused:
            if end > want > start:  # with what was read, a boundary of the tiers behind it is one again
                for pages in known:
                    pages.update(range(start, want))
                assert end <= last and not self._lacking(known, start, end), (start, end, want)
            else:
                assert end == want, (start, end, want)
            assert prefetcher.pop_loaded_pages(handle) == want - start, (start, end, want)
            self.num_ends += want - start
            read = sum(count for component, count in self.gets[gets:] if component == 0)
            self.num_beside += read < want - start
        prefetcher.abort(handle)  # it runs

    def check_hints(self) -> None:
        """What the tree believes storage to have is there, unless it was lost."""
        if self.depot.has_lost:
            return
        for node in self.tree.nodes():
            names = self.hashes(self.tree.path_key(node))
            if node.stored:
                assert all(name in self.depot.pages[0] for name in names[node.start :]), node
            if node.boundary_stored:
                for kind, shelf in zip(self.components[1:], self.depot.pages[1:]):
                    assert all(name in shelf for name in names[max(0, node.end - kind.reach) :]), node

    def settle(self) -> None:
        self.depot.faults = 0.0
        super().settle()
        for handle in self.waiting:
            assert self.cache.prefetcher is not None
            self.cache.prefetcher.abort(handle)
        self.waiting.clear()
        super().settle()
        assert self.cache.prefetcher is not None
        assert len(self.cache.prefetcher) == self.cache.prefetcher.room.num_short


class StoredPlayer(Player):
    """`Player` with storage: prefetches, losses, faults, detaches and restarts."""

    def __init__(self, setup: Setup, seed: int):
        self.world: StoredWorld = StoredWorld(setup, seed)

    def ask(self, draw: Draw) -> None:
        world = self.world
        world.cache.tick()
        world.set_policy(("best_effort", "wait_complete", "timeout")[draw(3)])
        world.set_step((1, 2, 4, 64)[draw(4)])
        world.waiting.append(world.prefetch(world.key(draw, limit=MAX_LENGTH)))

    def answer(self, draw: Draw) -> None:
        """A request looks whether to go on, or is aborted."""
        world = self.world
        if not world.waiting:
            return
        handle = world.waiting.pop(draw(len(world.waiting)))
        prefetcher = world.cache.prefetcher
        assert prefetcher is not None
        if draw(4) == 0:
            prefetcher.abort(handle)
        elif not prefetcher.progress(handle):
            world.waiting.append(handle)
        elif draw(4):  # else it may run, and waits on
            prefetcher.abort(handle)
        else:
            world.waiting.append(handle)

    def thin(self, draw: Draw) -> None:
        """Windows and records leave a tier."""
        for component in range(1, len(self.world.components)):
            self.world.cache.supply.evict(Tier(draw(2)), 1 + draw(20), component)

    def peace(self, draw: Draw) -> None:
        self.world.faults = 0.0
        if draw(3):
            self.restart(draw)
        if draw(2):
            self.world.fetch_in_peace(self.world.key(draw, limit=MAX_LENGTH))
            for _ in range(3):
                self.thin(draw)
        if draw(4) and not self.world.controller.storage_attached:
            self.world.attach()
        self.world.fetch_in_peace(self.world.key(draw, limit=MAX_LENGTH))

    def lose(self, draw: Draw) -> None:
        self.world.depot.lose((0.05, 0.2, 0.6)[draw(3)])

    def storage_fault(self, draw: Draw) -> None:
        self.world.depot.faults = (0.0, 0.0, 0.1, 0.4)[draw(4)]

    def detach(self, draw: Draw) -> None:
        """Detach and, sooner or later, attach again."""
        world = self.world
        if world.controller.storage_attached:
            world.cache.detach_storage(100.0)
            assert not world.cache.in_flight.tickets(JobKind.QUERY, JobKind.READ, JobKind.STORE)
        else:
            world.attach()

    def restart(self, draw: Draw) -> None:
        while self.world.running:
            self.finish(draw)
        self.world.faults = 0.0
        if draw(3):
            self.world.settle()
        self.world.restart()

    MOVES = {
        **Player.MOVES, ask: 14, answer: 10, peace: 9, lose: 2, storage_fault: 3, detach: 1, restart: 3,
        thin: 4,
    }  # fmt: skip
