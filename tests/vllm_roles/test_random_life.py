"""Random lives of the roles: every read is checked by the model, every page is in one place at the end.

And the same lives with a fault planted in the roles: each must be seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hiradix.adapters.vllm import scheduler, stores, worker
from hiradix.adapters.vllm.orders import Orders
from hiradix.adapters.vllm.requests import Tracked
from hiradix.cache import foreign_device, host_index
from hiradix.cache.foreign_device import BlockTables
from hiradix.memory.compare import Apart
from tests.seeds import assert_seen
from tests.vllm_roles.mini_vllm import FakeLora, FakeRequest, MiniVLLM, S, World

PREFIXES = 3
MOVES = (*("add", "step", "step", "work") * 2, "abort", "hold", "copy", "fault", "reset", "switch", "follow")


def drawn_world(rng: random.Random) -> World:
    window = rng.choice([0, 0, 5, 9])
    return World(
        num_blocks=rng.choice([14, 20, 40]) * (2 if window else 1),
        host_pages=rng.choice([3, 8, 30]),
        num_workers=rng.choice([1, 1, 2]),
        window=window,
        load_async=bool(window) or rng.random() < 0.5,
        budget=rng.choice([3, 9, 40]),
        max_running=rng.choice([1, 3, 6]),
        write_policy=rng.choice(["write_through", "write_through", "write_through_selective", "write_back"]),
        prefetch_policy=rng.choice(["best_effort", "timeout", "wait_complete"]),
        prefix_cache=not window and rng.random() < 0.6,
        batch_pages=rng.choice([1, 2, 128]),
        seed=rng.randrange(1 << 30),
        policy=rng.choice(["lru", "ghd", "2q"]),
    )


class Life:
    """One seed's moves on one engine, and on a second one over the same store.

    compares: whether storage compares before it serves; the second one's weights are others then, every other
    time.
    """

    def __init__(
        self, seed: int, compares: bool = False, draw: Callable[[random.Random], World] = drawn_world
    ) -> None:
        self.rng = rng = random.Random(seed)
        world = draw(rng)
        self.world = replace(
            world, compares=compares, deferred=(0, 0, 1, 3)[world.seed % 4], no_regret=world.seed % 3 == 0
        )
        self.other_weights = 1000 if compares and seed % 2 else 0
        has_store = rng.random() < 0.6
        self.store: list[dict[str, bytes]] | None = (
            [{} for _ in range(self.world.num_workers)] if has_store else None
        )
        self.vllm = MiniVLLM(self.world, self.store)
        self.count = 0

    def add(self) -> None:
        rng = self.rng
        which, length = rng.randrange(PREFIXES), rng.randrange(1, 6 * S)
        tokens = [1 + (which * 31 + i) % 11 for i in range(length)] + [rng.randrange(3) for _ in range(2)]
        salt, lora = rng.choice([None, None, "x"]), rng.choice([None, None, FakeLora("l", "no/such")])
        self.count += 1
        self.vllm.add(FakeRequest(f"r{self.count}", tokens, rng.randrange(1, 7), salt, lora))

    def abort(self) -> None:
        alive = [*self.vllm.waiting, *self.vllm.running]
        if alive:
            self.vllm.abort(self.rng.choice(alive))

    def step(self) -> None:
        self.vllm.step()
        self.vllm.role.check()

    def work(self) -> None:
        for rank in self.vllm.ranks:
            for _ in range(self.rng.randrange(4)):
                rank.driver.step()

    def hold(self) -> None:
        """A worker's thread makes no progress for a while."""
        driver = self.rng.choice(self.vllm.ranks).driver
        name = self.rng.choice(["fetch", "store"])
        driver.held ^= {name}

    def copy(self) -> None:
        rank = self.rng.choice(self.vllm.ranks)
        self.rng.choice(rank.transports).fails = 1

    def fault(self) -> None:
        self.rng.choice(self.vllm.ranks).storage.fault = self.rng.choice(["", "exists", "get", "put"])

    def reset(self) -> None:
        """As after a change of weights, of which it is always one."""
        if self.rng.random() < 0.2:
            for rank in self.vllm.ranks if self.rng.random() < 0.5 else ():
                rank.driver.run()
            self.vllm.update_weights(self.world.prefix_cache or self.rng.random() < 0.5)

    def switch(self) -> None:
        """Storage is attached, whether there is some or not, or detached, whatever uses it."""
        if self.store is not None:
            self.vllm.role.storage.ask(self.rng.choice(["fake", "fake", None]), {})

    def follow(self) -> None:
        """A worker's thread that attaches or detaches."""
        self.rng.choice(self.vllm.ranks).follow()

    def play(self, num_moves: int) -> None:
        for _ in range(num_moves):
            getattr(self, self.rng.choice(MOVES))()
        self.end()
        if (
            self.store is not None
        ):  # another process with the same store, and the weights of the first one's start
            self.vllm = MiniVLLM(self.world, self.store)
            self.vllm.weights = self.other_weights
            for _ in range(num_moves * 2 if self.world.compares else num_moves // 4):
                getattr(self, self.rng.choice(["add", "step", "work"]))()
            self.end()

    def end(self) -> None:
        for rank in self.vllm.ranks:
            rank.driver.held.clear()
            rank.storage.fault = ""
            for transport in rank.transports:
                transport.fails = 0
        self.vllm.drain()


@settings(max_examples=120)
@example(417)  # loaded requests held all blocks behind one that had none
@given(st.integers(0, 1 << 30))
def test_nothing_wrong_is_read_and_everything_is_given_back(seed: int) -> None:
    Life(seed).play(90)


@settings(max_examples=30)
@example(238)  # who waited got room in a step that was said to be quiet
@example(43)  # who joined a prefetch late asked for pages behind its prompt's end
@given(st.integers(0, 1 << 30))
def test_nothing_wrong_is_read_of_a_store_that_models_of_one_name_share(seed: int) -> None:
    Life(seed, compares=True).play(90)


def other_weights_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Apart, "is_same", True)


def test_a_comparison_that_finds_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    other_weights_are_the_same(monkeypatch)
    assert_seen(lambda seed: Life(seed, compares=True).play(90), range(1, 400, 2))


def no_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_device.ForeignDevice, "fences", lambda self, written: ())


def promised_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_index, "ARRIVING", host_index.READY)


def failed_saves_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_index.HostIndex, "lose", lambda self, key, start, taken: self.arrived(taken))


def failed_loads_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = worker.WorkerRole.collect

    def collect(self: worker.WorkerRole, orders: object) -> worker.Collected:
        return worker.Collected(whole(self, orders).loaded)  # type: ignore[arg-type]

    monkeypatch.setattr(worker.WorkerRole, "collect", collect)


def promises_are_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = host_index.HostIndex.lock

    def lock(self: host_index.HostIndex, key: object) -> object:
        held = whole(self, key)  # type: ignore[arg-type]
        if held is not None:
            self.tree.unlock(held)
        return held

    monkeypatch.setattr(host_index.HostIndex, "lock", lock)


def full_pages_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scheduler.SchedulerRole.quiet_step
    monkeypatch.setattr(scheduler.SchedulerRole, "quiet_step", lambda self, computed: whole(self, ()))


def what_happens_ends_no_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler.SchedulerRole, "_happened", lambda self: None)


def blocks_are_taken_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = worker.WorkerRole.before_forward

    def before_forward(self: worker.WorkerRole, orders: Orders) -> None:
        own = {save.ticket for save in orders.jobs.saves if save.before_forward}
        whole(self, replace(orders, fences=tuple(set(orders.fences) - own)))

    monkeypatch.setattr(worker.WorkerRole, "before_forward", before_forward)


def what_vllm_has_is_promised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scheduler.SchedulerRole.lookup

    def lookup(self: scheduler.SchedulerRole, request: FakeRequest, local_tokens: int) -> int | None:
        found = whole(self, request, local_tokens)
        return found + local_tokens if found else found

    monkeypatch.setattr(scheduler.SchedulerRole, "lookup", lookup)


def what_vllm_has_is_loaded_over(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scheduler.SchedulerRole._load

    def load(self: scheduler.SchedulerRole, tracked: Tracked, table: BlockTables, num_tokens: int) -> bool:
        local, tracked.local_tokens = tracked.local_tokens, 0
        is_there = whole(self, tracked, table, num_tokens)
        tracked.local_tokens = local
        return is_there

    monkeypatch.setattr(scheduler.SchedulerRole, "_load", load)


def a_reset_goes_by_requests_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Tracked, "is_stale", property(lambda self: False, lambda self, value: None), raising=False
    )


def a_reset_keeps_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores.StorageTracker, "start_anew", lambda self: None)


FAULTS = (
    a_reset_goes_by_requests_that_run,
    a_reset_keeps_storage,
    what_vllm_has_is_promised_again,
    what_vllm_has_is_loaded_over,
    blocks_are_taken_without_waiting,
    no_fences,
    promised_before_it_is_there,
    failed_saves_are_served,
    failed_loads_are_not_reported,
    promises_are_not_locked,
    full_pages_are_not_looked_for,
    what_happens_ends_no_quiet,
)


SEEN_BY = 388
"""A seed that sees the fault that is seen most rarely: it is tried first, the others behind it."""


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert_seen(lambda seed: Life(seed).play(90), (SEEN_BY, *range(400)))
