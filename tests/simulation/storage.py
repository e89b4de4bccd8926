"""Storage of the simulation: a store that outlives servers, faults chosen by the seed, calls that hang.

A store refuses to take a page whose bytes are not what its name says, so a wrong key is seen when it is
written, not when somebody happens to read it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hiradix.errors import StorageError
from hiradix.storage.guard.breaker import BreakerLimits
from hiradix.storage.guard.guard import GuardedStorage, GuardLimits
from hiradix.storage.guard.stores import Stores
from hiradix.storage.kit.call_threads import CallTimeout, NoFreeThread
from hiradix.storage.protocol import Traits
from hiradix.transfer import StepDriver
from tests.simulation.memory import Broken

FAULTS = ("error", "hang", "slow", "short", "lie", "junk", "miss", "full")


@dataclass
class Weather:
    """How badly storage behaves: chance of a fault per call, and which kinds there are now."""

    rng: random.Random
    rate: float = 0.0
    kinds: Sequence[str] = FAULTS
    dead: bool = False

    def draw(self) -> str | None:
        if self.dead:
            return "error"
        if self.rate and self.rng.random() < self.rate:
            return self.rng.choice(list(self.kinds))
        return None


@dataclass
class Store:
    """Pages by full name; belongs to no backend, so it survives detach and restart."""

    pages: dict[str, bytes] = field(default_factory=dict)
    capacity: int = 1 << 30


CheckPut = Callable[[str, bytes], None]  # raises Broken if the bytes are not what the name says


class SimBackend:
    """A backend over a `Store`; misbehaves as the weather says, but never swaps one page for another."""

    def __init__(self, store: Store, weather: Weather, check_put: CheckPut, is_checked: bool):
        self.store, self.weather, self._check_put = store, weather, check_put
        self._is_checked = is_checked  # the guard looks at the bytes: damaged ones may be called good
        self.traits = Traits() if is_checked else Traits(verifies=True, namespaced=True, direct=True)
        self.num_calls = 0
        self.closed = False

    def _enter(self, call: str) -> str | None:
        self.num_calls += 1
        if self.closed:
            raise StorageError("closed")
        fault = self.weather.draw()
        if fault == "error":
            raise OSError(f"injected: {call}")
        return fault

    def exists(self, keys: Sequence[str]) -> Any:
        fault = self._enter("exists")
        if fault == "lie":
            return self.weather.rng.choice([len(keys) + 5, -1, None, "all", len(keys)])
        count = next((i for i, key in enumerate(keys) if key not in self.store.pages), len(keys))
        return count // 2 if fault in ("short", "miss") else count

    def get(self, keys: Sequence[str], into: Sequence[Sequence[memoryview]]) -> Any:
        fault, rng = self._enter("get"), self.weather.rng
        answer = []
        for key, views in zip(keys, into, strict=True):
            data = self.store.pages.get(key)
            if data is None or (fault in ("miss", "junk") and rng.random() < 0.5):
                views[0][:4] = b"junk"  # a failed get may leave anything behind
                answer.append(fault == "junk" and data is not None and self._is_checked)
                continue
            views[0][:] = data
            answer.append(True)
        if fault == "short":
            return answer[: rng.randint(0, len(answer))]
        return rng.choice([None, 7, [None] * len(answer)]) if fault == "lie" else answer

    def put(self, keys: Sequence[str], pages: Sequence[Sequence[memoryview]]) -> Any:
        fault, rng = self._enter("put"), self.weather.rng
        answer = []
        for key, views in zip(keys, pages, strict=True):
            full = len(self.store.pages) >= self.store.capacity
            if full or fault == "full" or (fault in ("miss", "junk") and rng.random() < 0.5):
                answer.append(False)
                continue
            data = bytes(views[0])
            self._check_put(key, data)
            self.store.pages.setdefault(key, data)
            answer.append(True)
        if fault == "short":
            return answer[: rng.randint(0, len(answer))]
        return rng.choice([None, 7, [None] * len(answer)]) if fault == "lie" else answer

    def delete(self, keys: Sequence[str]) -> None:
        self._enter("delete")
        for key in keys:
            self.store.pages.pop(key, None)

    def clear(self) -> None:
        self._enter("clear")
        self.store.pages.clear()

    def close(self) -> None:
        self.closed = True


class SimLane:
    """One worker of the guard. A call that hangs takes the whole deadline; its work is done later."""

    def __init__(self, pool: SimLanes):
        self._pool = pool
        self.kind: object = None
        self._memory = [memoryview(bytearray())] * 2

    def staging(self, num_bytes: int, which: int = 0) -> memoryview:
        if len(self._memory[which]) < num_bytes:
            self._memory[which] = memoryview(bytearray(num_bytes))
        return self._memory[which][:num_bytes]

    def run(self, work: Callable[[], Any], timeout_s: float) -> Any:
        pool = self._pool
        fault = pool.weather.draw()
        if fault == "hang" or timeout_s <= 0:
            pool.driver.advance(max(0.0, timeout_s))
            pool.late.append((self, work))
            raise CallTimeout(f"no answer within {timeout_s:.3f} s")
        if fault == "slow":
            pool.driver.advance(timeout_s * pool.weather.rng.random())
        return work()

    def start(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Nothing runs beside its caller: it is done when it is waited for."""
        return work

    finish = run


class SimLanes:
    """What `GuardedStorage` takes for its threads: in simulation a call runs on the worker that makes it."""

    def __init__(self, driver: StepDriver, weather: Weather, num_threads: int = 2):
        self.driver, self.weather = driver, weather
        self.late: list[tuple[SimLane, Callable[[], Any]]] = []
        self.num_ended_abandoned = 0
        self._free = [SimLane(self) for _ in range(num_threads)]
        self._num_threads = num_threads
        self._closed = False

    @property
    def num_busy(self) -> int:
        return self._num_threads - len(self._free)

    @contextmanager
    def thread(self, timeout_s: float, extra: bool = False, kind: object = None) -> Iterator[SimLane]:
        if extra and not self._closed and not self._free:
            self.driver.advance(max(0.0, timeout_s))
            self._free.append(SimLane(self))
            self._num_threads += 1
        if self._closed or not self._free:
            self.driver.advance(0.0 if self._closed else max(0.0, timeout_s))
            raise NoFreeThread("all workers are in calls that have not ended")
        thread = self._free.pop()
        try:
            yield thread
        except CallTimeout:
            raise
        except BaseException:
            self._free.append(thread)
            raise
        self._free.append(thread)

    def is_full(self, kind: object) -> bool:
        """Whether calls of a kind that were left behind have all workers: here all kinds share them."""
        return not self._free

    def land(self) -> bool:
        """The oldest hung call ends after all, in its staging memory, which nobody waits for."""
        if not self.late:
            return False
        thread, work = self.late.pop(0)
        try:
            work()
        except Broken:
            raise
        except Exception:
            pass
        self.num_ended_abandoned += 1
        self._free.append(thread)
        return True

    def close(self) -> None:
        self._closed = True


def guarded(backend: SimBackend, fingerprint: Any, driver: StepDriver, threads: SimLanes) -> Stores:
    limits = GuardLimits(
        deadline_s=0.2,
        staging_bytes=2048,
        num_workers=2,
        admin_timeout_s=0.5,
        breaker=BreakerLimits(retry_after_s=0.2),
    )
    guard = GuardedStorage(backend, fingerprint, limits, clock=driver.now, threads=threads)  # type: ignore[arg-type]
    return Stores([guard])
