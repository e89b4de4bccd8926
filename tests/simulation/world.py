"""Everything around one cache in one thread: requests, workers, storage, faults and administrators.

One seed chooses the configuration and every move. Time is virtual. See `World.move` for the list of moves.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from hiradix.apps.engine.api import Scope
from hiradix.apps.engine.checks import check_conservation
from hiradix.apps.engine.scheduler import Scheduler, SchedulerLimits
from hiradix.apps.engine.turns import Turns
from hiradix.cache import HostTier
from hiradix.config import PREFETCH_POLICIES, WRITE_POLICIES, ExtraConfig
from hiradix.errors import CacheError
from hiradix.memory import ReqToTokenPool
from hiradix.policy.admission import admission_policies, make_admission
from hiradix.policy.eviction import eviction_policies
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.policy.prices import Prices
from hiradix.policy.write_policy import WritePolicy
from hiradix.prefix_cache import CacheInitParams, EvictParams, HiRadixCache
from hiradix.storage import PageFingerprint
from hiradix.transfer import (
    FOUR_WORKERS,
    TWO_WORKERS,
    FailReason,
    HiCacheController,
    JobKind,
    Runtime,
    StepDriver,
    TransferLimits,
)
from hiradix.tree import Tier
from hiradix.tree.hashing import PageRows, hash_pages, namespace_seed
from tests.simulation.engine import VOCABULARY, Parts, SimEngine, SimRequest
from tests.simulation.memory import Broken, DeviceAllocator, DevicePages, HostAllocator, HostPages, SimStreams
from tests.simulation.memory import Transport as SimTransport
from tests.simulation.storage import FAULTS, SimBackend, SimLanes, Store, Weather, guarded

SCOPES = (Scope(), Scope(), Scope(extra_key="x"), Scope(cache_salt="x"))
NUM_IDS = 10  # request ids: few, so that they are used again at once
MAX_HOLD_S = 0.6
ROUNDS_TO_DRAIN = 400


@dataclass(frozen=True)
class Setup:
    """One configuration, drawn by the seed."""

    page_size: int
    device_pages: int
    host_pages: int
    write_policy: str
    prefetch_policy: str
    no_regret: bool
    order: str
    two_workers: bool
    late: bool
    overlap: bool
    direct: bool
    chunk_tokens: int | None
    max_running: int
    threshold_pages: int
    queued_jobs: int
    batch_pages: int
    capacity_share: float
    schedule_policy: str

    @staticmethod
    def draw(rng: random.Random) -> Setup:
        page_size = rng.choice([1, 2, 4, 16])
        device_pages = rng.randint(6, 30)
        return Setup(
            page_size=page_size,
            device_pages=device_pages,
            host_pages=max(2, int(device_pages * rng.choice([0.3, 0.7, 1.0, 1.5, 2.0, 4.0]))),
            write_policy=rng.choice(WRITE_POLICIES),
            prefetch_policy=rng.choice(PREFETCH_POLICIES),
            no_regret=rng.random() < 0.3,
            order=rng.choice(eviction_policies()),
            two_workers=rng.random() < 0.3,
            late=rng.random() < 0.3,
            overlap=rng.random() < 0.5,
            direct=rng.random() >= 0.75,
            chunk_tokens=rng.choice([None, page_size, 2 * page_size + 1, 5 * page_size]),
            max_running=rng.randint(1, 5),
            threshold_pages=rng.choice([1, 1, 2]),
            queued_jobs=rng.choice([2, 5, 1024]),
            batch_pages=rng.choice([1, 3, 128]),
            capacity_share=rng.choice([0.5, 1.0]),
            schedule_policy=rng.choice(admission_policies()),
        )


class World:
    """See the module's docstring."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.setup = Setup.draw(self.rng)
        self.driver = StepDriver(self.rng.getrandbits(32))
        self.weather = Weather(random.Random(self.rng.getrandbits(32)))
        self.copy_faults = self.alloc_faults = 0.0
        self.stores = {"alpha": Store(), "beta": Store(capacity=40)}
        self.threads: list[SimLanes] = []
        self.history: list[tuple[Scope, list[int]]] = []
        self.released: dict[str, float] = {}  # held worker -> when it goes on
        self.num_moves = 0
        self.totals: Counter[str] = Counter()
        self._names: dict[int, str] = {}
        self._build()

    def _build(self) -> None:
        setup, size = self.setup, self.setup.page_size
        self.streams = SimStreams(setup.late)
        self.pool = DevicePages(setup.device_pages, size)
        self.host_pool = HostPages(setup.host_pages, size)
        self.allocator = DeviceAllocator(
            self.pool, setup.device_pages * size, self.streams, lambda: self._chance(self.alloc_faults)
        )
        self.host = HostAllocator(self.host_pool, lambda: self._chance(self.alloc_faults))
        transfer_limits = TransferLimits(
            queued_jobs=setup.queued_jobs, batch_pages=setup.batch_pages, copy_pages=3, gate_timeout_s=10.0
        )
        self.controller = HiCacheController(
            self.pool,
            self.host_pool,
            transport=SimTransport(self.streams, lambda: self._chance(self.copy_faults)),
            runtime=Runtime(
                driver=self.driver,
                clock=self.driver.now,
                limits=transfer_limits,
                workers=TWO_WORKERS if setup.two_workers else FOUR_WORKERS,
                streams=self.streams,
            ),
        )
        rows = ReqToTokenPool(setup.max_running, setup.device_pages * size)
        params = CacheInitParams(False, rows, self.allocator, size, eviction_policy=setup.order)
        host = HostTier(
            self.host,
            self.controller,
            WritePolicy.from_name(setup.write_policy),
            PrefetchPolicy.from_name(setup.prefetch_policy, self._prefetch_limits()),
            no_regret=setup.no_regret,
        )
        self.cache = HiRadixCache(params, host=host, storage_factory=self._open_storage)
        policy = make_admission(setup.schedule_policy, max(setup.device_pages, setup.host_pages) * size)
        turns = Turns(policy, self.cache, Prices(self.cache.no_regret, size), self.driver.now)
        limits = SchedulerLimits(setup.max_running, 24, setup.chunk_tokens, size)
        scheduler = Scheduler(self.cache, self.allocator, rows, limits, turns)
        self.engine = SimEngine(
            self.cache, scheduler, Parts(self.pool, self.streams, self.driver, setup.overlap)
        )
        self.scheduler = scheduler
        self._moves, self._weights = zip(*self._table())

    def _prefetch_limits(self) -> PrefetchLimits:
        setup = self.setup
        return PrefetchLimits(
            setup.page_size,
            threshold_tokens=setup.threshold_pages * setup.page_size,
            timeout_base_s=0.05,
            capacity_share=setup.capacity_share,
        )

    def _chance(self, share: float) -> bool:
        return share > 0 and self.rng.random() < share

    def _open_storage(self, name: str, extra: ExtraConfig) -> Any:
        if self.weather.draw() is not None:
            raise OSError("injected: open")
        backend = SimBackend(self.stores[name], self.weather, self._check_put, not self.setup.direct)
        threads = SimLanes(self.driver, self.weather)
        self.threads.append(threads)
        fingerprint = PageFingerprint("sim", page_size=self.setup.page_size)
        return guarded(backend, fingerprint, self.driver, threads)

    # -- what names must mean -----------------------------------------------------------------

    def note(self, scope: Scope, tokens: list[int], chain: Any) -> None:
        """Remember the storage name of each whole page of a sequence, by its last token's number."""
        size = self.setup.page_size
        num = len(tokens) // size
        if num == 0 or chain[num * size - 1] in self._names:
            return
        rows = np.array(tokens[: num * size], np.int64).reshape(num, size)
        prior = namespace_seed(scope.extra_key, scope.cache_salt)
        for page, digest in enumerate(hash_pages(PageRows(prior, rows))):
            self._names[chain[(page + 1) * size - 1]] = digest.hex()

    def note_request(self, request: Any) -> list[int]:
        tokens: list[int] = request.tokens(0, request.num_tokens).tolist()
        self.note(Scope(request.extra_key, request.cache_salt), tokens, request.chain)
        return tokens

    def remove(self, request: Any) -> None:
        self.note_request(request)
        self.scheduler.remove(request.rid)

    def _check_put(self, name: str, data: bytes) -> None:
        page = np.frombuffer(data[: self.host_pool.page_bytes], np.int64)
        link = int(page.reshape(-1, self.setup.page_size)[0, -1])
        if link not in self._names:  # the end of an answer that is being written
            for request in [*self.scheduler.running, *self.scheduler.waiting, *self.engine.finished]:
                self.note_request(request)
        if self._names.get(link) != name.rsplit("-", 1)[-1]:
            raise Broken(f"storage is given {name} for the page that ends with {link}")

    # -- moves --------------------------------------------------------------------------------

    def _table(self) -> list[tuple[Any, float]]:
        return [
            (self.work, 40),
            (self.engine.step, 26),
            (self.arrive, 14),
            (self.abort, 2),
            (self.run_stream, 4 if self.setup.late else 0),
            (self.hold, 0.5),
            (self.change_weather, 0.6),
            (self.change_faults, 0.4),
            (self.attach, 2),
            (self.detach, 0.3),
            (self.swap, 0.3),
            (self.change_policies, 0.3),
            (self.clear_storage, 0.1),
            (self.land, 1),
            (self.flush, 0.5),
            (self.restart, 0.2),
            (self.evict, 0.3),
            (self.cache.check_hicache_events, 3),
            (self.retract, 0.3),
            (self.reorder, 0.5),
        ]

    def move(self) -> None:
        """One move of the seed's choice, then what must hold after each."""
        self.num_moves += 1
        if self.released:
            self._release()
        self.rng.choices(self._moves, self._weights)[0]()
        if self.engine.finished:
            self._collect()
        self.check_step()

    def work(self) -> None:
        """A worker's step; without work, the scheduler's."""
        if not self.driver.step():
            self.engine.step()

    def run_stream(self) -> None:
        self.streams.advance_any(self.rng)

    def arrive(self) -> None:
        """A new prompt, a longer one of an old, or the same again; under an id that may just have ended."""
        if self.scheduler.is_full or len(self.scheduler.waiting) > 6:
            return
        rid = str(self.rng.randrange(NUM_IDS))
        if self.scheduler.find(rid) is not None:
            return
        size, capacity = self.setup.page_size, self.allocator.size
        scope, tokens = self.rng.choice(SCOPES), []
        if self.history and self.rng.random() < 0.75:
            scope, tokens = self.rng.choice(self.history)
            tokens = tokens[: self.rng.choice([len(tokens), self.rng.randint(0, len(tokens))])]
        longest = max(1, capacity - len(tokens))
        num_new = 1 + min(longest - 1, self.rng.randint(0, size * self.rng.choice([1, 3, 6])))
        tokens = (tokens + [self.rng.randrange(VOCABULARY) for _ in range(num_new)])[:capacity]
        max_new = self.rng.choice([1, 1, 2, 3, min(size + 2, 6), 2 * size + 1])
        max_new = min(max_new, capacity - len(tokens) + 1)
        request = SimRequest(rid, tokens, max_new, scope)
        request.arrived_s = self.driver.now()
        self.note(scope, tokens, request.chain)
        self.scheduler.add(request)

    def abort(self) -> None:
        self.engine.forward()
        waiting, running = self.scheduler.waiting, self.scheduler.running
        if waiting or running:
            self.remove(self.rng.choice([*waiting, *running]))

    def retract(self) -> None:
        self.engine.forward()
        if self.scheduler.running:
            self.scheduler.retract(self.rng.choice(self.scheduler.running))

    def reorder(self) -> None:
        """Those who wait are to be fetched in another order than that in which they came."""
        rids = [request.rid for request in self.scheduler.waiting]
        self.cache.prefetch_in_order(self.rng.sample(rids, self.rng.randint(0, len(rids))))

    def hold(self) -> None:
        """A worker makes no progress for a while."""
        name = self.rng.choice(sorted({w.name for w in self.controller._job_table.workers.values()}))
        self.driver.held.add(name)
        self.released[name] = self.driver.now() + self.rng.random() * MAX_HOLD_S

    def _release(self) -> None:
        now_s = self.driver.now()
        for name in [name for name, when_s in self.released.items() if when_s <= now_s]:
            del self.released[name]
            self.driver.held.discard(name)

    def change_weather(self) -> None:
        weather, rng = self.weather, self.rng
        weather.rate = rng.choice([0.0, 0.0, 0.03, 0.2, 1.0])
        weather.kinds = rng.sample(FAULTS, rng.randint(1, 4))
        weather.dead = rng.random() < 0.1

    def change_faults(self) -> None:
        self.copy_faults = self.rng.choice([0.0, 0.0, 0.05, 0.3])
        self.alloc_faults = self.rng.choice([0.0, 0.0, 0.1, 0.5])

    def attach(self) -> None:
        limits = self._prefetch_limits()
        extra = {
            "prefetch_threshold": limits.threshold_tokens,
            "prefetch_timeout_base": limits.timeout_base_s,
        }
        self.cache.attach_storage_backend(self.rng.choice(list(self.stores)), json.dumps(extra))

    def detach(self) -> None:
        self.cache.detach_storage_backend()

    def swap(self) -> None:
        self.detach()
        self.attach()

    def change_policies(self) -> None:
        name = self.cache.stats().storage_backend
        if name is not None:
            prefetch, write = self.rng.choice(PREFETCH_POLICIES), self.rng.choice(WRITE_POLICIES)
            ok, message = self.cache.attach_storage_backend(name, None, None, prefetch, write)
            assert ok or not self.cache.enable_storage, message

    def clear_storage(self) -> None:
        self.cache.clear_storage_backend()

    def land(self) -> None:
        for threads in self.threads:
            threads.land()
        self.threads = [threads for threads in self.threads if threads.late or not threads._closed]

    def flush(self) -> None:
        """Reset, as `flush_cache` does without requests; transfers may be under way."""
        self._remove_all()
        try:
            self.cache.reset()
        except CacheError:
            assert self.driver.held, "a reset failed though every worker can work"

    def _remove_all(self) -> None:
        self.engine.forward()
        for request in [*self.scheduler.waiting, *self.scheduler.running]:
            self.remove(request)

    def restart(self) -> None:
        """The process ends, whatever hangs, and a new one finds what storage has."""
        self._remove_all()
        self.tally(self.totals)
        self.cache.close()
        self.controller.poll()
        assert self.controller.is_idle, "a closed controller owes results"
        now_s = self.driver.now()
        self.driver = StepDriver(self.rng.getrandbits(32))
        self.driver.advance(now_s)
        self.released.clear()
        self._build()

    def tally(self, totals: Counter[str]) -> None:
        """Add what this process did to the counts of the whole run."""
        counters = self.cache.cache.counters
        for name in (
            "loaded",
            "prefetched",
            "refetched",
            "backed_up",
            "written",
            "load_failed",
            "load_too_slow",
        ):
            totals[name] += getattr(counters, name)
        totals["moves"] += self.num_moves - totals["moves"]
        totals["retracted"] += self.scheduler.num_retractions
        totals["tokens checked"] += self.engine.num_reads
        totals["parts computed"] += self.engine.num_parts

    def evict(self) -> None:
        self.cache.evict(EvictParams(self.rng.randint(1, 4 * self.setup.page_size)))

    def _collect(self) -> None:
        for request in self.engine.finished:
            self.history.append((Scope(request.extra_key, request.cache_salt), self.note_request(request)))
        del self.history[:-12]
        self.engine.finished.clear()

    # -- what must hold -----------------------------------------------------------------------

    def check_step(self) -> None:
        """Conservation and caps, from counts alone: O(running + flights)."""
        size, tree = self.setup.page_size, self.cache.tree
        own = sum(r.num_allocated - r.cache_protected_len for r in self.scheduler.running) // size
        free, shared = self.allocator.pages.available, tree.resident_pages(Tier.DEVICE)
        assert free + shared + own == self.setup.device_pages, (free, shared, own, self.setup.device_pages)
        flights = self.cache.cache.in_flight
        in_flight, resident = len(flights.owned()), tree.resident_pages(Tier.HOST)
        assert self.host.available + resident + in_flight == self.setup.host_pages, (
            self.host.available, resident, in_flight, self.setup.host_pages,
        )  # fmt: skip
        self.cache.cache.prefetcher.room.check()  # room of those who wait: never above its cap, nobody else's
        pending = sum(self.controller.pending(kind) for kind in JobKind)
        assert pending == len(flights), f"{pending} tickets are open, the cache knows {len(flights)}"
        for kind, job_queue in self.controller._job_table.job_queues.items():
            assert len(job_queue.waiting) <= self.setup.queued_jobs, (kind, len(job_queue.waiting))

    def check(self) -> None:
        """Every invariant of every part. O(everything)."""
        check_conservation(self.cache, self.allocator, self.scheduler)
        bugs = {k.value: s.failures.get(FailReason.BUG, 0) for k, s in self.controller.stats().kinds.items()}
        assert not any(bugs.values()), f"assertions failed in workers: {bugs}"

    def drain(self) -> None:
        """Faults stop: every request is answered, every transfer ends, every counter drains to 0."""
        self.weather.rate, self.weather.dead = 0.0, False
        self.copy_faults = self.alloc_faults = 0.0
        self.driver.held.clear()
        self.released.clear()
        while any(threads.late for threads in self.threads):
            self.land()
        for _ in range(ROUNDS_TO_DRAIN):
            if not (self.scheduler.waiting or self.scheduler.running):
                break
            self.engine.step()
            self.run_workers()
            self.driver.advance(1.0)
            self._collect()
            self.check_step()
        else:
            left = [*self.scheduler.waiting, *self.scheduler.running]
            raise AssertionError(f"requests are never answered: {[r.rid for r in left]}")
        assert self.cache.drain(1000.0)
        for _ in range(3):
            self.run_workers()
            self.engine.step()
        self.streams.synchronize()
        self.check()
        self.assert_idle()

    def run_workers(self) -> None:
        """Until none has work. Between two requests nothing may lie there that nobody starts."""
        num_overslept = self.driver.num_overslept
        self.driver.run()
        if not (self.scheduler.waiting or self.scheduler.running):
            assert self.driver.num_overslept == num_overslept, "jobs that nobody woke their worker for"

    def assert_idle(self) -> None:
        """Promise 6: nothing is held, queued, running or counted any more."""
        cache, tree = self.cache, self.cache.tree
        assert self.controller.is_idle and len(cache.cache.in_flight) == 0
        assert cache.num_in_flight == 0, cache.num_in_flight
        assert (
            not cache._prefetcher._waiting.handles() and not cache._prefetcher._loaded and not cache._counted
        )
        assert not cache._copies._grown, f"copies of the rows of {list(cache._copies._grown)} are kept"
        assert not self.controller._job_table._open and not cache.cache.write_through.storage_backup._ending
        turns = self.scheduler.turns
        assert not (turns.policy.waiting or turns._calls or turns._fresh or len(turns.controller))
        for tier in Tier:
            assert tree.protected_pages(tier) == 0, f"{tree.protected_pages(tier)} {tier.name} pages locked"
        assert not cache._by_node._of, "locks of nodes that nobody gave back"
        assert sum(threads.num_busy for threads in self.threads) == 0
        cache.reset()
        self.check()
        assert self.allocator.pages.available == self.setup.device_pages
        assert self.host.available == self.setup.host_pages
        cache.close()
        assert self.controller.poll() == []
