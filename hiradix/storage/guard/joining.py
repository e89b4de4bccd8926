"""Stores that cannot be reached when they are opened: joined later, beside the calls, which are misses.

    opened(name, make, ...)    the store, where the first attempt gives one in time; else a `Joiner`
    Joiner                     attempts on threads of their own, each with a deadline, until one succeeds
    JoiningStorage             stands where a guard of the joined store will stand

Whatever depends on the store (traits, memory it registers, what it recovers) is known with the attempt that
succeeds: the whole guarded store is made then, told of the memory that came meanwhile, shown to whoever asked
for that, and only then served. A store that was joined once stays so; from there on the breaker watches it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hiradix.errors import ConfigError, Unreachable, described
from hiradix.settings import MAX_TIMEOUT_S, OPEN, Type, setting
from hiradix.storage.guard.breaker import NO_TROUBLES, BreakerState, Troubles, breaker_figures
from hiradix.storage.guard.calls import FlagsWithReason
from hiradix.storage.guard.not_joined import NotJoined
from hiradix.storage.guard.stores import StoragePart, Stores, WhenJoined
from hiradix.storage.kit.call_threads import ABANDONED
from hiradix.storage.kit.meters import Histogram, Meters, MissReason, Op
from hiradix.storage.protocol import Page, StorageBackend, Traits

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 1.0
MAX_UNDER_WAY = 2
"""Attempts at once: a second is begun where the first hangs, no third."""
CLOSE_WAIT_S = 1.0
"""Longest wait of `close` for the thread that waits between attempts, which has nothing else to do."""


@dataclass(frozen=True)
class JoinLimits:
    """timeout_s: longest wait for one attempt. retry_s: longest pause between two, which begin a second apart
    and then twice as far each time."""

    timeout_s: float = setting(
        "join_timeout_s",
        Type.SECONDS,
        30.0,
        "longest wait for a store to open, at a start and in each later attempt: see "
        "[joining](storage.md#a-store-that-is-not-there-at-start)",
        minimum=0.001,
        maximum=MAX_TIMEOUT_S,
        over_http=OPEN,
    )
    retry_s: float = setting(
        "join_retry_s",
        Type.SECONDS,
        30.0,
        "longest pause between two attempts to join a store that did not answer; the first are 1, 2, 4, ... "
        "seconds",
        minimum=0.001,
        maximum=MAX_TIMEOUT_S,
        over_http=OPEN,
    )


def opened(name: str, make: Callable[[], Stores], limits: JoinLimits, declared: Traits) -> Stores | Joiner:
    """The store that `make` gives, or a Joiner where it cannot be reached now or within an attempt's time.

    make: raises Unreachable for a store that does not answer, and ConfigError for wrong values, which is
    raised here. declared: what is known of the backend's traits before it is made.
    """
    joiner = Joiner(name, make, limits, declared)
    try:
        return joiner.first()
    except Unreachable as error:
        joiner.go_on(error)
        return joiner
    except BaseException:
        joiner.close(0.0)
        raise


class Joiner:
    """Tries to open a store on threads of its own until it succeeds, and owns what it opens. Thread-safe."""

    def __init__(self, name: str, make: Callable[[], Stores], limits: JoinLimits, declared: Traits):
        self.store: Stores | None = None
        self.declared = declared
        self.meters = Meters()
        self.num_attempts = 0
        self.is_refused = False  # the last answer was that a value is wrong
        self._name, self._make, self._limits = name, make, limits
        self._changed = threading.Condition()
        self._memories: list[tuple[int, memoryview]] = []
        self._calls: list[WhenJoined] = []
        self._closed = False
        self._num_under_way = self._num_ended = 0
        self._error: ConfigError | None = None  # of the attempt that ended last
        self._has_warned = False  # that the store is not joined: `first` says so to whoever opens it
        self._thread: threading.Thread | None = None
        self._began_s = time.monotonic()

    def first(self) -> Stores:
        """The store of the first attempt. Raises its ConfigError; Unreachable where it takes too long."""
        self._begin()
        with self._changed:
            self._changed.wait_for(lambda: self._num_ended > 0, self._limits.timeout_s)
            if self._num_ended == 0:
                raise Unreachable(f"no answer within {self._limits.timeout_s:g} s")
            if self.store is not None:
                return self.store
            assert self._error is not None
            raise self._error

    def go_on(self, error: Unreachable) -> None:
        """Try again and again beside the callers, until the store is joined or this is closed."""
        with self._changed:
            if self.store is None:
                self._has_warned = True
                logger.warning(
                    "storage %s: not joined: %s; until it is, nothing is stored or read; tried again every "
                    "%g s at the latest", self._name, error, self._limits.retry_s,
                )  # fmt: skip
        self._thread = threading.Thread(target=self._keep_trying, name="hiradix-storage-join", daemon=True)
        self._thread.start()

    def introduce(self, part: int, memory: memoryview) -> bool:
        """Tell the store of a host pool's memory, now or when it is joined."""
        with self._changed:
            if self.store is None:
                self._memories.append((part, memory))
                return True
            store = self.store
        return store.parts[part].register(memory)

    def when_joined(self, call: WhenJoined) -> None:
        """`call` with the store: before it serves, or at once where it does already."""
        with self._changed:
            if self.store is None:
                self._calls.append(call)
                return
            store = self.store
        call(store)

    def close(self, timeout_s: float) -> None:
        """Give up, or close what was joined, waiting at most `timeout_s`. Idempotent.

        An attempt that is in its call is left behind; what it still gives is closed.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            ABANDONED.add(self._num_under_way)
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(min(timeout_s, CLOSE_WAIT_S))
        if self.store is not None:
            self.store.close(timeout_s)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def figures(self) -> dict[str, float]:
        """Figures that a joined store's guard does not have."""
        return {
            "joined": float(self.store is not None),
            "join_attempts": self.num_attempts,
            "join_refused": float(self.is_refused),
        }

    # -- attempts -------------------------------------------------------------------------

    def _keep_trying(self) -> None:
        wait_s = min(FIRST_WAIT_S, self._limits.retry_s)
        while True:
            with self._changed:
                if self._changed.wait_for(self._is_over, wait_s * random.uniform(0.8, 1.0)):
                    return
                if self._num_under_way >= MAX_UNDER_WAY:
                    continue
            ended = self._try()
            wait_s = min(self._limits.retry_s, 2 * wait_s) if ended else self._limits.retry_s

    def _try(self) -> bool:
        """One attempt; False where it has not ended in its time, and goes on."""
        before = self._num_ended
        self._begin()
        with self._changed:
            return self._changed.wait_for(
                lambda: self._is_over() or self._num_ended > before, self._limits.timeout_s
            )

    def _is_over(self) -> bool:
        return self._closed or self.store is not None

    def _begin(self) -> None:
        with self._changed:
            if self._closed:
                return
            self.num_attempts += 1
            self._num_under_way += 1
        threading.Thread(target=self._attempt, name="hiradix-storage-joining", daemon=True).start()

    def _attempt(self) -> None:
        store: Stores | None = None
        error: ConfigError | None = None
        try:
            store = self._make()
            is_taken = self._take(store)
        except ConfigError as refusal:
            error, is_taken = refusal, False
        except BaseException as fault:  # a backend may raise anything, and this thread has no caller
            error, is_taken = ConfigError(described(fault)), False
        if store is not None and not is_taken:
            store.close()
        with self._changed:
            self._num_under_way -= 1
            self._num_ended += 1
            if self._closed:
                ABANDONED.add(-1)
            elif error is not None and self.store is None:
                self._failed(error)
            self._changed.notify_all()

    def _failed(self, error: ConfigError) -> None:
        """Warn once when a store that was away answers and refuses a setting, and when that ends. Locked."""
        is_refused = not isinstance(error, Unreachable)
        if self._has_warned and is_refused != self.is_refused:
            what = "still not joined, as it refuses" if is_refused else "not joined again"
            logger.warning("storage %s: %s: %s", self._name, what, error)
        self.is_refused, self._error = is_refused, error

    def _take(self, store: Stores) -> bool:
        """Have `store` serve, once it knows all memory and all have seen it; False: nobody wants it."""
        num_memories = num_calls = 0
        while True:
            with self._changed:
                if self._is_over():
                    return False
                memories, calls = self._memories[num_memories:], self._calls[num_calls:]
                if not memories and not calls:
                    self.store, self.is_refused = store, False
                    if self._has_warned:
                        logger.warning(
                            "storage %s: joined, %.0f s after it was asked for, with attempt %d",
                            self._name, time.monotonic() - self._began_s, self.num_attempts,
                        )  # fmt: skip
                    self._memories, self._calls = [], []
                    return True
            for part, memory in memories:
                store.parts[part].register(memory)
            for call in calls:
                self._shown(call, store)
            num_memories += len(memories)
            num_calls += len(calls)

    def _shown(self, call: WhenJoined, store: Stores) -> None:
        try:
            call(store)
        except Exception:  # whoever asked to see it: the store is none the worse for it
            logger.exception("storage %s: what was to be done when it is joined failed", self._name)


class JoiningStorage(StoragePart):
    """One component's part of a store that is joined later; as a `GuardedStorage` from then on.

    Until then every page is a miss, for the reason `not_joined`, and no call waits.
    """

    def __init__(self, joiner: Joiner, index: int = 0):
        self._joiner, self._index = joiner, index
        self._away = NotJoined(joiner.declared)

    @property
    def _store(self) -> StoragePart | None:
        store = self._joiner.store
        return None if store is None else store.guards[self._index]

    @property
    def backend(self) -> StorageBackend:
        """The joined store's; until then one that raises StorageError."""
        store = self._store
        return self._away if store is None else store.backend

    @property
    def state(self) -> BreakerState:
        """Open, until there is a breaker."""
        store = self._store
        return BreakerState.OPEN if store is None else store.state

    @property
    def is_joined(self) -> bool:
        """Whether the store serves."""
        return self._store is not None

    def when_joined(self, call: WhenJoined) -> None:
        """`call` with the whole joined store, once, on the thread that joins it and before it serves.

        At once, on the caller's thread, where it serves already.
        """
        self._joiner.when_joined(call)

    # -- pages ----------------------------------------------------------------------------

    def exists(self, keys: Sequence[str]) -> int:
        """The number of leading keys that are there; 0 until the store has joined."""
        store = self._store
        if store is not None:
            return store.exists(keys)
        self._missed(Op.EXISTS, len(keys))
        return 0

    def get(self, keys: Sequence[str], into: Sequence[Page]) -> list[bool]:
        """Read pages into `into`."""
        store = self._store
        return self._missed(Op.GET, len(keys)) if store is None else store.get(keys, into)

    def put(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Store pages."""
        store = self._store
        return self._missed(Op.PUT, len(keys)) if store is None else store.put(keys, pages)

    def _missed(self, op: Op, num_pages: int) -> list[bool]:
        reason = MissReason.CLOSED if self._joiner.is_closed else MissReason.NOT_JOINED
        self._joiner.meters.of(op).ended(None, 0, 0, ((reason, num_pages),))
        return FlagsWithReason([False] * num_pages, reason)

    @property
    def may_read(self) -> bool:
        """Whether a read would be let through now."""
        store = self._store
        return store is not None and store.may_read

    @property
    def reads_in_part(self) -> bool:
        """Whether some of the stores within can be read now, and others cannot."""
        store = self._store
        return store is not None and store.reads_in_part

    @property
    def troubles(self) -> Troubles:
        """The guard's troubles; joining counts as one change."""
        store = self._store
        return NO_TROUBLES if store is None else store.troubles.and_those(Troubles(changes=1))

    @property
    def wants_computed(self) -> bool:
        """False, as a guard has it."""
        return False

    @property
    def frees_deleted(self) -> bool:
        """Whether a deleted page's bytes are given back."""
        store = self._store
        return self._joiner.declared.deletes if store is None else store.frees_deleted

    @property
    def is_read_only(self) -> bool:
        """Whether the joined store takes no pages."""
        store = self._store
        return store is not None and store.is_read_only

    def refuse(self, num_pages: int) -> list[bool]:
        """The answer to a put in a store that is read-only."""
        store = self._store
        return self._missed(Op.PUT, num_pages) if store is None else store.refuse(num_pages)

    # -- the store as a whole -------------------------------------------------------------

    def delete(self, keys: Sequence[str]) -> bool:
        """Forget keys; False where the store failed or is not joined."""
        store = self._store
        return store is not None and store.delete(keys)

    def forget_tenant(self, tenant: str) -> int | None:
        """Forget all pages of a tenant; None where the store cannot tell, failed or is not joined."""
        store = self._store
        return None if store is None else store.forget_tenant(tenant)

    def forget_behind(self, keys: Sequence[str]) -> int | None:
        """Forget what continues these keys; None where the store cannot tell, failed or is not joined."""
        store = self._store
        return None if store is None else store.forget_behind(keys)

    def scrub(self) -> bool:
        """Leave nothing of what was forgotten; False where the store failed or is not joined."""
        store = self._store
        return store is not None and store.scrub()

    def clear(self) -> bool:
        """Forget all pages; False where the store failed or is not joined."""
        store = self._store
        return store is not None and store.clear()

    def ping(self) -> bool:
        """Whether the store can be reached now, through the guard that serves."""
        store = self._store
        return store is not None and store.ping()

    def register(self, memory: memoryview) -> bool:
        """Tell the backend of a host pool's memory, now or when it is joined."""
        return self._joiner.introduce(self._index, memory)

    def close(self, timeout_s: float = 5.0) -> None:
        """Close what was joined, or give up joining it: for all components of the store. Idempotent."""
        self._joiner.close(timeout_s)

    def histograms(self) -> Mapping[Op, Histogram]:
        """Durations of calls that reached the backend."""
        store = self._store
        if store is None:
            return {op: self._joiner.meters.of(op).histogram() for op in Op}
        return store.histograms()

    def stats(self) -> Mapping[str, float]:
        """Figures by name, with what was missed before the store was joined."""
        store, before = self._store, self._joiner.meters.snapshot()
        if store is None:
            none = breaker_figures(dict.fromkeys(Op, BreakerState.OPEN), dict.fromkeys(Op, 0))
            idle = {"workers_busy": 0, "late_answers": 0}
            return {**before, **none, **idle, **self._joiner.figures()}
        missed = {name: value for name, value in before.items() if "_missed_" in name}
        found = dict(store.stats())
        for name, value in missed.items():
            found[name] = found.get(name, 0) + value
        return {**found, **self._joiner.figures()}
