"""Wrappers and guard in stacks drawn at random, over a backend that fails as it likes, against what was put.

A page is what was stored under its name or a miss: whatever raised, lied, tore, swapped or vanished, in
whatever order the wrappers stand, and after restarts, of another revision too.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from hiradix.errors import StorageError
from hiradix.storage import Batch, GuardedStorage, GuardLimits, Page, StorageBackend, StorageContext, Traits
from hiradix.storage.backends.tier import backend as tier_module
from hiradix.storage.guard.breaker import BreakerLimits
from hiradix.storage.kit.call_threads import fill_head
from hiradix.storage.kit.in_place import InPlacePage
from hiradix.storage.protocol import fits
from hiradix.storage.wrappers.account import Account
from hiradix.storage.wrappers.compress import CompressedStorage
from hiradix.storage.wrappers.encrypt import EncryptedStorage
from hiradix.storage.wrappers.negative import NegativeCache
from hiradix.storage.wrappers.quota import QuotaStorage
from hiradix.storage.wrappers.retry import RetryingStorage
from tests.contracts.storage import FINGERPRINT, OTHER, blank, bytes_of, content, key_of
from tests.storage.doubles import FakeClock, MemoryBackend

PAGE_BYTES, NUM_KEYS, TENANT_PAGES = 96, 6, 3
KEYS = [key_of(number) for number in range(NUM_KEYS)]
KEY_FILE = bytes(range(32))
FAULTS = ("none", "raise", "raise late", "lie", "tear", "swap", "flip", "vanish", "partial")
batches = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)


class Wild(MemoryBackend):
    """Memory whose next call goes wrong in one way. No page of it is ever proven: whoever is above must.

    traits: `in_place` and `ragged` are kept.
    """

    def __init__(self, context: StorageContext, places: dict[str, OrderedDict[str, bytes]], traits: Traits):
        super().__init__(context, places)
        self.traits = traits
        self.fault, self.rng = "none", random.Random(0)

    def _next(self) -> str:
        fault, self.fault = self.fault, "none"
        if fault == "raise":
            raise OSError(5, "the store is on fire")
        if fault == "vanish":
            for name in [name for name in self.pages if self.rng.random() < 0.5]:
                del self.pages[name]
        if fault == "flip":
            for name in [name for name in self.pages if self.rng.random() < 0.5]:
                data = bytearray(self.pages[name])
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
                self.pages[name] = bytes(data)
        if fault == "swap" and len(self.pages) > 1:
            one, other = self.rng.sample(list(self.pages), 2)
            self.pages[one], self.pages[other] = self.pages[other], self.pages[one]
        return fault

    def get(self, keys: Sequence[str], into: Sequence[Page]) -> list[bool]:
        fault = self._next()
        ok = [self._fill(key, page) for key, page in zip(keys, into)]
        if fault == "tear":
            for page in into:
                self._tear(page)
        if fault == "raise late":
            raise StorageError("the connection was reset")
        return [True] * len(ok) if fault in ("lie", "tear") else ok

    def _fill(self, key: str, page: Page) -> bool:
        stored = self.pages.get(self._names([key])[0])
        if stored is None or not fits(len(stored), page, self.traits.ragged):
            return False
        if not isinstance(page, InPlacePage):
            fill_head(memoryview(stored), page)
            return True
        page.begin(len(stored))
        at = self.rng.randrange(len(stored) + 1)
        return all(page.write(memoryview(piece)) for piece in (stored[:at], stored[at:])) and page.is_whole

    def _tear(self, page: Page) -> None:
        if isinstance(page, InPlacePage):
            page.begin(page.num_bytes)
            page.write(memoryview(bytes(page.num_bytes // 2)))
        else:
            page[-1][page[-1].nbytes // 2 :] = bytes(page[-1].nbytes - page[-1].nbytes // 2)

    def put(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        fault = self._next()
        if fault == "lie":
            return [True] * len(keys)
        if fault == "partial":
            ok = super().put(keys[:1], pages[:1])
            return [*ok, *[False] * (len(keys) - 1)]
        if fault == "tear":
            pages = [[memoryview(bytes(page[0])[:-9] + b"torn here")] for page in pages]
        ok = super().put(keys, pages)
        if fault == "raise late":
            raise StorageError("the connection was reset")
        return ok

    def exists(self, keys: Sequence[str]) -> int:
        return len(keys) if self._next() == "lie" else super().exists(keys)

    def delete(self, keys: Sequence[str]) -> None:
        self._next()
        super().delete(keys)


def _retry(inner: StorageBackend, machine: StackStates) -> StorageBackend:
    return RetryingStorage(inner, 1, 0.0, lambda _: None)


def _negative(inner: StorageBackend, machine: StackStates) -> StorageBackend:
    return NegativeCache(inner, 10.0, machine.clock)


def _encrypted(inner: StorageBackend, machine: StackStates) -> StorageBackend:
    return EncryptedStorage(inner, KEY_FILE, machine.fingerprint.digest()[:32])


def _quota(inner: StorageBackend, machine: StackStates) -> StorageBackend:
    account = Account(machine.folder / "account", "wild")
    limit_bytes = TENANT_PAGES * (PAGE_BYTES + 200)
    return QuotaStorage(inner, account, lambda tenant: limit_bytes, machine.tick)


def _compressed(inner: StorageBackend, machine: StackStates) -> StorageBackend:
    return CompressedStorage(inner, 1)


def _tier(inner: StorageBackend, machine: StackStates) -> StorageBackend:
    """What is below is far, and another memory is near; each has a guard of its own."""
    near = machine.memory(machine.near)
    stores = {"upper": near, "lower": inner}

    def opened(name: str, keys: Mapping[str, Any], context: StorageContext) -> GuardedStorage:
        return GuardedStorage(stores[name], context.fingerprint, machine.limits, machine.clock)

    with mock.patch.object(tier_module, "_open", opened):
        halves = {name: {"backend": "memory"} for name in stores}
        return tier_module.TierBackend(StorageContext(machine.fingerprint, halves, PAGE_BYTES))


WRAPPERS: Mapping[str, Callable[[StorageBackend, Any], StorageBackend]] = {
    "retry": _retry, "negative": _negative, "quota": _quota, "tier": _tier,
    "encrypted": _encrypted, "compressed": _compressed,
}  # fmt: skip


def _can_stand(stack: Sequence[str]) -> bool:
    """A tier takes pages of one length only."""
    return "tier" not in stack or "compressed" not in stack[stack.index("tier") :]


stacks = (
    st.permutations(sorted(WRAPPERS))
    .flatmap(lambda order: st.integers(0, len(order)).map(lambda count: order[:count]))
    .filter(_can_stand)
)


class StackStates(RuleBasedStateMachine):
    """The oracle is a function of the key: what stands under a name is the same whoever stores it."""

    @initialize(stack=stacks, failures=st.integers(1, 4), in_place=st.booleans())
    def start(self, stack: list[str], failures: int, in_place: bool) -> None:
        self.stack = stack
        self.traits = Traits(in_place=in_place, ragged="compressed" in stack)
        self.limits = GuardLimits(deadline_s=60.0, breaker=BreakerLimits(failures, 5.0))
        self.folder, self.clock, self.now_ns = Path(tempfile.mkdtemp()), FakeClock(), 0
        self.places: dict[str, OrderedDict[str, bytes]] = {}
        self.near: dict[str, OrderedDict[str, bytes]] = {}
        self.fingerprint = FINGERPRINT
        self.store = self._open()

    def tick(self) -> int:
        self.now_ns += 2_000_000_000
        return self.now_ns

    def memory(self, places: dict[str, OrderedDict[str, bytes]]) -> Wild:
        self.wilds.append(Wild(StorageContext(self.fingerprint, {}, PAGE_BYTES), places, self.traits))
        return self.wilds[-1]

    def _open(self) -> GuardedStorage:
        self.wilds: list[Wild] = []
        backend: StorageBackend = self.memory(self.places)
        for name in self.stack:
            backend = WRAPPERS[name](backend, self)
        traits = getattr(backend, "traits", Traits())
        assert traits.verifies == bool({"encrypted", "tier"} & set(self.stack))
        plain = {"encrypted", "compressed", "tier"}.isdisjoint(self.stack)
        assert traits.in_place == (plain and self.traits.in_place), self.stack
        return GuardedStorage(backend, self.fingerprint, self.limits, self.clock)

    def _bytes(self, key: str) -> bytes:
        return bytes_of(f"{key} {self.fingerprint.revision}", PAGE_BYTES)

    def _hits(self, keys: Sequence[str]) -> list[bool]:
        pages = [blank(PAGE_BYTES) for _ in keys]
        ok = self.store.get(keys, pages)
        assert len(ok) == len(keys)
        for key, page, good in zip(keys, pages, ok):
            assert not good or content(page) == self._bytes(key), f"{self.stack}: {key} is not what was put"
        return ok

    def _put(self, keys: Sequence[str], tenant: str) -> list[bool]:
        pages = [[memoryview(self._bytes(key))] for key in keys]
        return self.store.put(Batch.of(keys, tenant=tenant), pages)

    @rule(fault=st.sampled_from(FAULTS), seed=st.integers(0, 1000), near=st.booleans())
    def go_wrong(self, fault: str, seed: int, near: bool) -> None:
        """The next call that comes through does."""
        wild = self.wilds[-1 if near else 0]
        wild.fault, wild.rng = fault, random.Random(seed)

    @rule(keys=batches, tenant=st.sampled_from(["", "salt:a"]))
    def put(self, keys: list[str], tenant: str) -> None:
        assert len(self._put(keys, tenant)) == len(keys)

    @rule(keys=batches)
    def get(self, keys: list[str]) -> None:
        self._hits(keys)

    @rule(keys=batches)
    def exists(self, keys: list[str]) -> None:
        assert 0 <= self.store.exists(keys) <= len(keys)

    @rule(keys=batches)
    def delete(self, keys: list[str]) -> None:
        if self.store.delete(keys):
            assert not any(self._hits(keys))

    @rule(seconds=st.sampled_from([1.0, 6.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule(other=st.booleans())
    def restart(self, other: bool) -> None:
        """With the same model, or another revision of it in the same store."""
        self.store.close()
        self.fingerprint = OTHER if other else FINGERPRINT
        self.store = self._open()

    @rule(keys=batches)
    def heals(self, keys: list[str]) -> None:
        """When nothing goes wrong any more, what is damaged is found, put again and there."""
        for wild in self.wilds:
            wild.fault = "none"
        self.clock.now_s += 20.0
        self._hits(keys[:1])  # the breaker's probe
        self._hits(keys)  # finds damaged pages
        wanted = keys[:TENANT_PAGES] if "quota" in self.stack else keys
        self.store.delete([key for key in KEYS if key not in wanted])
        assert self._put(wanted, "salt:a") == [True] * len(wanted), self.stack
        assert self._hits(wanted) == [True] * len(wanted), self.stack

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


TestStackStates = StackStates.TestCase
TestStackStates.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
