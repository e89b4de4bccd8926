"""Seeded lives of an engine, the same moves for every kind of it, and what must hold whatever happens.

The oracle knows what each position's numbers are made of, and compares bytes: of every page that a match may
promise from the host, and of every page in storage. What is read on the device the engines compare
themselves.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hiradix.tree import RadixKey
from hiradix.tree.hashing import PageRows, hash_pages
from tests.executors.device_memory import MARK, state_bytes
from tests.executors.engines import Engine, LocalEngine, VllmEngine
from tests.vllm_roles.mini_vllm import LAYERS, FakeLora, FakeRequest, S, World

ENGINES: dict[str, Callable[[World, dict[str, bytes], random.Random], Engine]] = {
    "local": LocalEngine,
    "vllm": VllmEngine,
}
PREFIXES = 3
MOVES = {
    "arrive": 16, "arrive_together": 3, "step": 30, "work": 24, "abort": 5, "hold": 1, "fail_a_copy": 4,
    "fault": 2, "new_weights": 0.3, "attach": 2, "detach": 0.5,
}  # fmt: skip
LORA = FakeLora("l", "no/such")


KINDS: dict[str, Callable[[random.Random], tuple[int, int]]] = {  # the window, how many groups of states
    "full": lambda rng: (0, 0),
    "window": lambda rng: (rng.choice([5, 9]), 0),
    "states": lambda rng: (0, rng.choice([1, 2])),
    "both": lambda rng: (rng.choice([5, 9]), 1),
}


def drawn_world(rng: random.Random, attention: str) -> World:
    """A configuration with attention of that kind."""
    window, states = KINDS[attention](rng)
    num_beside = (window > 0) + states
    return World(
        num_blocks=rng.choice([12, 14, 24]) * (1 + num_beside),
        host_pages=rng.choice([3, 8, 30]),
        window=window,
        states=states,
        load_async=num_beside > 0 or rng.random() < 0.5,
        budget=rng.choice([3, 9, 40]),
        max_running=rng.choice([1, 3, 6]),
        write_policy=rng.choice(["write_through", "write_through", "write_through_selective", "write_back"]),
        prefetch_policy=rng.choice(["best_effort", "timeout", "wait_complete"]),
        prefix_cache=num_beside == 0 and rng.random() < 0.6,
        batch_pages=rng.choice([1, 2, 128]),
        seed=rng.randrange(1 << 30),
        policy=rng.choice(["lru", "ghd", "2q"]),
        deferred=rng.choice([0, 0, 1, 3]),
        no_regret=rng.random() < 0.3,
    )


class Life:
    """One seed's moves on one engine, and on a second one over the same store."""

    def __init__(
        self, kind: str, seed: int, attention: str = "full", store: dict[str, bytes] | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.store: dict[str, bytes] = {} if store is None else store
        world = drawn_world(self.rng, attention)
        self._first_state = 1 + (world.window > 0)
        self._make = ENGINES[kind], replace(world, write_policy=_possible(world))
        self.count = 0
        self.start()

    def start(self) -> None:
        """A process begins, with the weights that the first one began with, and finds what storage has."""
        make, world = self._make
        self.engine = make(world, self.store, self.rng)

    # -- moves ------------------------------------------------------------------------------

    def arrive(self) -> None:
        self._add(self._prompt(), self.rng.choice([None] * 4 + ["x"]), self.rng.choice([None] * 4 + [LORA]))

    def arrive_together(self) -> None:
        """Requests that want the same pages, and some of their own."""
        tokens = self._prompt()
        for _ in range(self.rng.randrange(2, 5)):
            self._add(
                [*tokens, *(self.rng.randrange(3) for _ in range(self.rng.choice([0, 0, S])))], None, None
            )

    def _prompt(self) -> list[int]:
        which, length = self.rng.randrange(PREFIXES), self.rng.randrange(1, 6 * S)
        return [1 + (which * 31 + i) % 11 for i in range(length)] + [self.rng.randrange(3) for _ in range(2)]

    def _add(self, tokens: list[int], salt: str | None, lora: FakeLora | None) -> None:
        self.count += 1
        self.engine.add(FakeRequest(f"r{self.count}", tokens, self.rng.randrange(1, 7), salt, lora))

    def step(self) -> None:
        self.engine.step()
        self.engine.check()

    def work(self) -> None:
        self.engine.work(self.rng.randrange(4))

    def abort(self) -> None:
        if alive := [*self.engine.waiting, *self.engine.running]:
            self.engine.abort(self.rng.choice(alive))

    def hold(self) -> None:
        """A worker that makes no progress, until this is done again."""
        self.engine.hold(self.rng.choice(["fetch", "store"]))

    def fail_a_copy(self) -> None:
        self.engine.fail_a_copy()

    def fault(self) -> None:
        self.engine.fault(self.rng.choice(["", "", "", "exists", "get", "get nothing", "put"]))

    def new_weights(self) -> None:
        self.engine.new_weights()

    def attach(self) -> None:
        self.engine.attach()

    def detach(self) -> None:
        self.engine.detach()

    def play(self, num_moves: int) -> Counter[str]:
        """So many moves, half of them after a restart. What came of them."""
        moves, weights, came = list(MOVES), list(MOVES.values()), Counter[str]()
        for number in range(num_moves):
            getattr(self, self.rng.choices(moves, weights)[0])()
            if number % 8 == 0:
                self.check_host()
            if number == num_moves // 2:
                came += self._end()
                self.start()
        return came + self._end()

    def _end(self) -> Counter[str]:
        self.engine.drain()
        self.check_host()
        self.check_storage()
        return Counter(self.engine.counts())

    # -- the oracle ---------------------------------------------------------------------------

    def check_host(self) -> None:
        """Every page that a match may promise from the host holds the numbers of exactly its tokens."""
        for key, page, component, data in self.engine.on_host():
            whose = _request_of(key, self.engine.weights)
            self._check(data, whose, page, component, f"on the host, of {key}")

    def check_storage(self) -> None:
        """So does every page in storage, of the weights that its name stands for."""
        wanted: dict[str, tuple[FakeRequest, int]] = {}
        for request in self.engine.done:
            wanted.update(_names(request))
        for name, data in self.store.items():
            name, _, component = name.partition("@")
            label, digest = name[:-64], name[-64:]
            if label not in self.engine.labels:
                continue  # of another engine over the same store
            request, page = wanted.get(digest, (None, 0))
            if request is not None:
                whose = replace(request, weights=self.engine.labels[label], _numbers={})
                self._check(data, whose, page, int(component or 0), f"in storage, of {request.request_id}")

    def _check(self, data: bytes, whose: FakeRequest, page: int, component: int, where: str) -> None:
        """Assert that `data` is what a component has for a page of these tokens: byte for byte, but for their
        order, which is the pool's."""
        if component >= self._first_state:
            numbers = [whose.number((page + 1) * S - 1) + component * MARK + n for n in range(LAYERS)]
            is_right = sorted(data) == sorted(b"".join(map(state_bytes, numbers)))
        else:
            is_right = _numbers(data) == _wanted(whose, page, component)
        assert is_right, f"page {page} of component {component} {where}"


def _possible(world: World) -> str:
    """vLLM's write_back is what its own prefix cache evicts."""
    return world.write_policy if world.prefix_cache or world.write_policy != "write_back" else "write_through"


def _request_of(key: RadixKey, weights: int) -> FakeRequest:
    lora = None if key.extra_key is None else LORA
    return FakeRequest("", key.tokens.tolist(), 0, key.cache_salt, lora, weights=weights)


def _names(request: FakeRequest) -> dict[str, tuple[FakeRequest, int]]:
    """What storage calls the pages of a request that has neither salt nor adapter."""
    if request.cache_salt is not None or request.lora_request is not None:
        return {}
    rows = np.array(request.all_token_ids[: request.num_tokens // S * S], np.int64).reshape(-1, S)
    return {name.hex(): (request, page) for page, name in enumerate(hash_pages(PageRows(b"", rows)))}


def _numbers(data: bytes) -> list[float]:
    return sorted(np.frombuffer(data, np.float64).tolist())


def _wanted(request: FakeRequest, page: int, component: int) -> list[float]:
    """K and V of a page's positions in all layers of a component."""
    numbers = [
        request.number(at) + component * MARK + layer
        for at in range(page * S, (page + 1) * S)
        for layer in range(LAYERS)
    ]
    return sorted([*map(float, numbers), *(-float(number) for number in numbers)])
