"""Residency of a waiting request's prompt: on the device, on the host, in storage."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hiradix.adapters.vllm.scheduler import SchedulerRole
from hiradix.policy.prices import Prices

LOOK_AGAIN_S = 1.0  # a lookup on the host is believed for so long
MOST_EMPTY = 64  # blocks: with more of them that hold nothing, the order of eviction can wait
UNCHANGED_S = 10.0  # or for so long where nothing has come or gone


class QueuedRequest(Protocol):
    """vLLM's Request, as far as it is read here."""

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    skip_reading_prefix_cache: bool
    block_hashes: Sequence[bytes]


class DevicePrefixes:
    """vLLM's own prefix cache, read and left as it is.

    A prefix is evicted from its end, so how much of one is there is found by bisection: O(log blocks), and
    O(1) where it is as much as last time. Blocks that went from the middle are seen by vLLM's own lookup
    alone. has_block: whether a block of this name is cached. view: a request's names, by blocks of
    `block_size`.
    """

    def __init__(
        self,
        block_size: int,
        has_block: Callable[[bytes], bool],
        view: Callable[[Sequence[bytes]], Sequence[bytes]],
    ) -> None:
        self.block_size = block_size
        self._has_block = has_block
        self._view = view

    def find(self, request: QueuedRequest, last: int = 0) -> int:
        """Leading blocks of the request that are on the device; `last`: as many as there were."""
        names = self.names(request)
        most = min(len(names), (request.num_tokens - 1) // self.block_size)
        last = min(last, most)
        if last and not self._has_block(names[last - 1]):
            most = last - 1
        elif last == most or not self._has_block(names[last]):
            return last
        return bisect_left(range(most), True, key=lambda i: not self._has_block(names[i]))

    def names(self, request: QueuedRequest) -> Sequence[bytes]:
        """The hashes of its whole blocks."""
        return self._view(request.block_hashes)


class BlockPool(Protocol):
    """vLLM's BlockPool, as far as it is used here."""

    num_gpu_blocks: int
    free_block_queue: Any

    def get_cached_block(self, name: Any, groups: list[int]) -> list[Any] | None: ...


class IdleBlocks:
    """vLLM's blocks of sessions with no request, so that those of a session that left are evicted first.

    Remembers the last request of each, in all as many blocks as the pool has: of more, none is there. O(blocks)
    for a request that ends and for a session that leaves. group: whose blocks they are.
    """

    def __init__(self, pool: BlockPool, group: int) -> None:
        self._pool = pool
        self._groups = [group]
        self._names: dict[str, Sequence[bytes]] = {}  # the session that ended last is the last one
        self._num_users: Counter[bytes] = Counter()
        self._num_names = 0

    def ended(self, session: str, names: Sequence[bytes]) -> None:
        """A request of `session` with these blocks is over."""
        self._forget(session)
        if not names:
            return
        self._names[session] = names
        self._num_users.update(names)
        self._num_names += len(names)
        while self._num_names > self._pool.num_gpu_blocks and len(self._names) > 1:
            self._forget(next(iter(self._names)))

    def leave(self, session: str) -> int:
        """Free blocks that no other session has are evicted before all others that hold something, from their
        prefix's end on. How many; none while the pool has more than MOST_EMPTY that hold nothing.
        """
        names = self._forget(session)
        queue = self._pool.free_block_queue
        empty = self._pop_empty()
        blocks = []
        if len(empty) <= MOST_EMPTY:
            for name in reversed(names):
                found = None if name in self._num_users else self._pool.get_cached_block(name, self._groups)
                if found is not None and found[0].ref_cnt == 0 and not found[0].is_null:
                    blocks.append(found[0])
        for block in blocks:
            queue.remove(block)
        queue.prepend_n(blocks)
        queue.prepend_n(empty)
        return len(blocks)

    def _pop_empty(self) -> list[Any]:
        """Take blocks that hold nothing, which are the first ones, off the queue: one more than MOST_EMPTY at
        most."""
        queue, empty = self._pool.free_block_queue, list[Any]()
        while queue.num_free_blocks and len(empty) <= MOST_EMPTY:
            block = queue.popleft()
            if block.block_hash is not None:
                queue.prepend_n([block])
                break
            empty.append(block)
        return empty

    def _forget(self, session: str) -> Sequence[bytes]:
        names = self._names.pop(session, ())
        self._num_names -= len(names)
        for name in names:
            self._num_users[name] -= 1
            if not self._num_users[name]:
                del self._num_users[name]
        return names


@dataclass(slots=True)
class _Found:
    """The answers of a request's last lookups. host_at: the state of the host index, and when it was asked.

    is_fetching: storage was being read for it then.
    """

    device_blocks: int = 0
    host_tokens: int = 0
    host_at: tuple[int, float] = (0, -UNCHANGED_S)
    is_fetching: bool = False


class QueuePrices:
    """Prices requests by where their prompts are. role: our connector's, or None: only the device counts.

    A price costs two looks at vLLM's block table, and now and then a walk of the host's tree: at most once in
    LOOK_AGAIN_S, where pages have come or gone since the last, and when what was fetched for it has come.
    """

    def __init__(
        self,
        prices: Prices,
        device: DevicePrefixes | None,
        role: SchedulerRole | None,
        clock: Callable[[], float],
    ) -> None:
        self._prices = prices
        self._device = device
        self._role = role
        self._clock = clock
        self._found: dict[str, _Found] = {}

    def forget(self, rid: str) -> None:
        self._found.pop(rid, None)

    def price_s(self, request: QueuedRequest) -> float:
        """Seconds to its first token if it were served now; of a prefill under way, what is left of it."""
        total = request.num_tokens
        if request.num_computed_tokens or request.skip_reading_prefix_cache:
            return self._prices.first_token_s(max(1, total - request.num_computed_tokens))
        found = self._found.setdefault(request.request_id, _Found())
        on_device = 0
        if self._device is not None:
            found.device_blocks = self._device.find(request, found.device_blocks)
            on_device = found.device_blocks * self._device.block_size
        loaded = fetched = 0
        if self._role is not None:
            self._look_on_host(self._role, request, found)
            loaded = max(0, found.host_tokens - on_device)
            if self._role.has_storage and self._role.index.is_open:
                pages = self._role.prefetcher.fetching_pages(request.request_id)
                fetched = pages * self._role.index.page_size
            fetched = max(0, min(fetched, total - 1 - on_device - loaded))
        return self._prices.first_token_s(max(1, total - on_device - loaded - fetched), loaded, fetched)

    def _look_on_host(self, role: SchedulerRole, request: QueuedRequest, found: _Found) -> None:
        tracked = role.requests.get(request.request_id)
        if tracked is None or not role.index.is_open:
            found.host_tokens = 0
            return
        counters, now_s = role.index.counters, self._clock()
        state = counters.evicted_host + counters.written + counters.prefetched
        is_fetching = role.has_storage and not role.prefetcher.is_done(request.request_id)
        is_fetched, found.is_fetching = found.is_fetching and not is_fetching, is_fetching
        believed_s = UNCHANGED_S if state == found.host_at[0] else LOOK_AGAIN_S
        if now_s - found.host_at[1] < believed_s and not is_fetched:
            return
        size = role.index.page_size
        key = tracked.key((request.num_tokens - 1) // size, size)
        found.host_tokens = role.index.find(key).num_pages * size
        found.host_at = state, now_s
