"""Gray failures of a store: one kind of call hangs, errs, drips or slows while the others work.

A world of `clocked` whose store is quick and useful, until one kind of call goes wrong for a long time, and
works again. What requests lose is what they took beyond computing their prompts; `Loss` adds it up.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hiradix.policy.no_regret import GatedTransfer
from hiradix.storage import PageFingerprint
from hiradix.storage.guard.guard import GuardedStorage, GuardLimits
from hiradix.storage.guard.stores import Stores
from hiradix.storage.kit.call_threads import CallTimeout, NoFreeThread
from hiradix.storage.kit.meters import Op
from tests.simulation.clocked import PAGE_S, SIZE, ClockBackend, ClockDriver, ClockedWorld, Ledger
from tests.simulation.storage import SimLane

LIMITS = GuardLimits(staging_bytes=1 << 12)
STORE_PAGES = 700
WELL, ILL, AGAIN = 45, 100, 15
CURED_S = 70.0  # more than a breaker's longest interval
DAMAGED_EVERY = (
    7  # requests: a page in the store is damaged, found out when it is read, and deleted to be put
)


@dataclass
class Takes(Exception):
    """Raised by a call that takes so long, and then does `work`."""

    seconds: float
    work: Callable[[], Any]


HOW: dict[str, Callable[[int], float]] = {
    "hangs": lambda num_pages: 1e9,
    "drips": lambda num_pages: 0.15 * num_pages,
    "slows": lambda num_pages: 0.95 * LIMITS.deadline_s,
    "stops": lambda num_pages: 1e9 if num_pages > 1 else 0.0,
    "just in time": lambda num_pages: 0.49 * LIMITS.deadline_s,
    "at once": lambda num_pages: 0.0002 * num_pages,
    "slowly": lambda num_pages: 0.02 * num_pages,
}
"""Seconds that a call of so many pages takes."""
PARTS = {
    f"{share:.0%} {how}": (how, share)
    for how in ("at once", "slowly", "drips", "just in time")
    for share in (0.4, 0.6, 0.9)
}
"""Reads of which a part comes: how long they take, and how much it is."""


class GrayBackend(ClockBackend):
    """`ills`: what is wrong with calls, by kind: one of `HOW`, "errs", "every second hangs", and of reads
    "brings nothing", which takes nearly half of the deadline, and of `PARTS`, how long and which share of the
    pages comes."""

    def __init__(self, driver: ClockDriver, tier: Any) -> None:
        super().__init__(driver, tier)
        self.ills: dict[Op, str] = {}
        self.calls: Counter[Op] = Counter()
        self.num_served = 0

    def _ill(self, op: Op, num_pages: int, work: Callable[[], Any]) -> Any:
        self.calls[op] += 1
        ill = self.ills.get(op)
        if ill == "errs":
            raise OSError(f"injected: {op.value}")
        if ill == "brings nothing":
            raise Takes(HOW["just in time"](num_pages), lambda: [False] * num_pages)
        if ill in PARTS:
            how, share = PARTS[ill]
            raise Takes(HOW[how](num_pages), lambda: self._part(work(), share))
        if ill == "every second hangs":
            ill = "hangs" if self.calls[op] % 2 else None
        if ill is not None:
            raise Takes(HOW[ill](num_pages), work)
        return work()

    def _part(self, answer: list[bool], share: float) -> list[bool]:
        """The leading share of what would come."""
        kept = int(share * len(answer))
        self.num_served -= answer[kept:].count(True)
        return answer[:kept] + [False] * (len(answer) - kept)

    def exists(self, keys: Any) -> Any:
        return self._ill(Op.EXISTS, len(keys), lambda: super(GrayBackend, self).exists(keys))

    def get(self, keys: Any, into: Any) -> Any:
        def read() -> Any:
            answer = super(GrayBackend, self).get(keys, into)
            self.num_served += answer.count(True)
            return answer

        return self._ill(Op.GET, len(keys), read)

    def put(self, keys: Any, pages: Any) -> Any:
        """Makes room by deleting the oldest."""
        over = list(self.store.pages)[: max(0, len(self.store.pages) + len(keys) - STORE_PAGES)]

        def write() -> Any:
            return self._ill(Op.PUT, len(keys), lambda: super(GrayBackend, self).put(keys, pages))

        try:
            if over:
                self.delete(over)
        except Takes as takes:
            evict = takes.work

            def evict_and_write() -> Any:
                evict()
                return write()

            raise Takes(takes.seconds, evict_and_write) from None
        return write()

    def delete(self, keys: Any) -> None:
        self._ill(Op.DELETE, len(keys), lambda: super(GrayBackend, self).delete(keys))

    def damage(self, rng: random.Random) -> None:
        """One page's bytes are others."""
        name = rng.choice(list(self.store.pages))
        self.store.pages[name] = bytes(len(self.store.pages[name]))


class GrayLane(SimLane):
    """A call takes what it says, but no longer than its caller waits."""

    def run(self, work: Callable[[], Any], timeout_s: float) -> Any:
        driver = self._pool.driver
        try:
            return work()
        except Takes as takes:
            if takes.seconds < timeout_s:
                driver.advance(takes.seconds)
                return takes.work()
            driver.advance(max(0.0, timeout_s))
            raise CallTimeout(f"no answer within {timeout_s:.3f} s") from None

    finish = run


class GrayLanes:
    """Call threads by kind, as `CallThreadPool` has them: one left behind comes back with `heal`, not before."""

    def __init__(self, driver: ClockDriver, num_threads: int) -> None:
        self.driver, self._num_threads = driver, num_threads
        self.left: Counter[object] = Counter()
        self.num_ended_abandoned = 0

    @property
    def num_busy(self) -> int:
        return self.left.total()

    def is_full(self, kind: object) -> bool:
        return self.left[kind] >= self._num_threads

    @contextmanager
    def thread(self, timeout_s: float, extra: bool = False, kind: object = None) -> Iterator[GrayLane]:
        if self.is_full(kind) and not extra:
            self.driver.advance(max(0.0, timeout_s))
            raise NoFreeThread("all workers are in calls that have not ended")
        thread = GrayLane(self)  # type: ignore[arg-type]
        thread.kind = kind
        try:
            yield thread
        except CallTimeout:
            self.left[thread.kind] += 1
            raise

    def heal(self) -> None:
        self.num_ended_abandoned += self.left.total()
        self.left.clear()

    def close(self) -> None:
        """No threads."""


@dataclass
class Loss(Ledger):
    """Seconds that requests took beyond computing their prompts."""

    losses: list[float] = field(default_factory=list)

    def check(self, took_s: float, alone_s: float, excuses: set[str]) -> None:
        self.counts["requests"] += 1
        self.losses.append(max(0.0, took_s - alone_s))

    @property
    def mean_s(self) -> float:
        return sum(self.losses) / len(self.losses)

    @property
    def worst_s(self) -> float:
        return max(self.losses)


class Outbox:
    """Results, each of which is there when its worker's time has come. A worker for the driver, as which it
    does nothing but wait for the next."""

    name = "outbox"

    def __init__(self, driver: ClockDriver) -> None:
        self._driver = driver
        self._results: list[tuple[float, int, Any]] = []

    def append(self, result: Any) -> None:
        heapq.heappush(self._results, (self._driver.now(), result.ticket, result))
        self._expect()

    def _expect(self) -> None:
        late = [when_s for when_s, _, _ in self._results if when_s > self._driver._now_s]
        self.has_work = bool(late)
        if late:
            self._driver._workers[self.name] = self
            self._driver._at[self.name] = min(late)

    def step(self) -> None:
        self._expect()

    def __len__(self) -> int:
        return sum(when_s <= self._driver._now_s for when_s, _, _ in self._results)

    def popleft(self) -> Any:
        return heapq.heappop(self._results)[2]


class GrayWorld(ClockedWorld):
    """See the module's docstring."""

    backend: GrayBackend
    threads: GrayLanes
    storage: GuardedStorage

    def __init__(self, seed: int, has_gate: bool = True) -> None:
        super().__init__(seed)
        for tier, share in ((GatedTransfer.LOAD, 0.02), (GatedTransfer.FETCH, 0.05)):
            self.tiers[tier].page_s, self.tiers[tier].fixed_s = share * PAGE_S, 0.0
        self.engine.forward_s = PAGE_S
        self.cache.cache.controller._job_table._outbox = Outbox(self.driver)  # type: ignore[union-attr, assignment]
        if not has_gate:
            self.cache.note_prefill = lambda num_tokens, seconds: None  # type: ignore[method-assign]

    def _open_storage(self) -> Stores:
        self.backend = GrayBackend(self.driver, self.tiers[GatedTransfer.FETCH])
        self.threads = GrayLanes(self.driver, LIMITS.num_workers)
        threads: Any = self.threads
        self.storage = GuardedStorage(
            self.backend, PageFingerprint("sim", page_size=SIZE), LIMITS, self.driver.now, threads, "gray"
        )
        return Stores([self.storage])

    def requests(self, number: int) -> Loss:
        """So many of them, and what they lost."""
        self.ledger = loss = Loss()
        for turn in range(number):
            if turn % DAMAGED_EVERY == 0 and self.backend.store.pages:
                self.backend.damage(self.rng)
            self.request()
        return loss


@dataclass
class Story:
    """What a store that fell ill and was cured cost. `served_*`: pages that it served meanwhile."""

    well: Loss
    ill: Loss
    ill_s: float
    served_well: int
    served_ill: int
    served_again: int
    calls: Counter[Op]


def play(seed: int, ills: dict[Op, str], has_gate: bool = True, num_ill: int = ILL) -> Story:
    """Requests while the store is well, while it is ill, and from `CURED_S` after it was cured."""
    world = GrayWorld(seed, has_gate)
    well = world.requests(WELL)
    served_well, start_s = world.backend.num_served, world.driver.now()
    world.backend.ills, world.backend.calls = ills, Counter()
    ill = world.requests(num_ill)
    ill_s, calls, served_ill = world.driver.now() - start_s, world.backend.calls, world.backend.num_served
    world.backend.ills = {}
    world.threads.heal()
    world.driver.advance(CURED_S)
    world.requests(AGAIN)
    again = world.backend.num_served
    world.cache.close()
    return Story(well, ill, ill_s, served_well, served_ill - served_well, again - served_ill, calls)


CASES: Sequence[tuple[Op, str]] = [
    *((op, how) for op in Op for how in ("hangs", "errs", "drips", "slows")),
    *((op, how) for op in (Op.EXISTS, Op.GET) for how in ("stops", "just in time", "every second hangs")),
    (Op.GET, "brings nothing"),
]
