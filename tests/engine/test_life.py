"""A seeded life of the engine on all tiers: arrivals, aborts, flushes, storage coming and going, small pools.

After every step the invariants and the conservation of pages are checked (the engines are made so); what is
answered must be what transformers answers.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from hiradix.apps.engine import Engine, SamplingParams, Scope
from hiradix.config import HiCacheConfig
from hiradix.prefix_cache import build_prefix_cache
from tests.engine.checkpoints import VOCAB, Reference
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Answer, assert_empty, collect
from tests.identity import Identity
from tests.seeds import seeded, seeds

NUM_LIVES = int(os.environ.get("HIRADIX_LIVES", "3"))
NUM_EVENTS = 120
POLICIES = ("write_through", "write_through_selective", "write_back")


class Life:
    """Does random things to one engine and remembers what was asked."""

    def __init__(self, engine: Engine, rng: random.Random, storage: Path):
        self.engine = engine
        self.rng = rng
        self.asked: dict[str, list[int]] = {}
        self.answers: dict[str, Answer] = {}
        self.storage = json.dumps({"prefetch_threshold": 16, "file_storage_path": str(storage)})
        self._stems = [[rng.randrange(VOCAB) for _ in range(150)] for _ in range(4)]

    def arrive(self) -> None:
        stem = self.rng.choice(self._stems)[: self.rng.randrange(1, 150)]
        prompt = stem + [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(0, 30))]
        rid = f"r{len(self.asked)}"
        self.asked[rid] = prompt
        params = SamplingParams(max_new_tokens=self.rng.randrange(1, 25))
        self.engine.add_request(rid, prompt, params, Scope(cache_salt=self.rng.choice([None, None, "b"])))

    def abort(self) -> None:
        if self.asked:
            self.engine.abort(self.rng.choice(list(self.asked)))

    def step(self) -> None:
        collect(self.answers, self.engine.step())
        if self.engine.is_blocked:
            self.engine.wait(0.05)

    def settle(self) -> None:
        for _ in range(3000):
            if self.engine.is_idle():
                return
            self.step()
            if not self.engine.has_work:
                self.engine.wait(0.05)
        raise AssertionError(f"never idle: {self.engine.info()}")

    def flush(self) -> None:
        self.settle()
        assert self.engine.flush()

    def toggle_storage(self) -> None:
        self.settle()
        if self.engine.info().storage_attached:
            assert self.engine.detach_storage()[0]
        else:
            ok, message = self.engine.attach_storage("file", self.storage, "timeout")
            assert ok, message

    def run(self) -> None:
        actions = [self.arrive] * 6 + [self.step] * 20 + [self.abort] * 2
        rare = [self.flush, self.toggle_storage]
        for number in range(NUM_EVENTS):
            self.rng.choice(rare if number % 30 == 29 else actions)()
        self.settle()


@seeded
@pytest.mark.parametrize("seed", seeds(NUM_LIVES))
def test_life(seed: int, llama: Reference, make_engine: MakeEngine, tmp_path: Path) -> None:
    rng = random.Random(seed)
    cache = HiCacheConfig(
        page_size=16,
        enable_hierarchical_cache=True,
        hicache_no_regret=False,
        hicache_ratio=rng.choice([0.5, 1.0, 3.0]),
        hicache_write_policy=POLICIES[seed % 3],
        hicache_mem_layout=rng.choice(["page_first", "layer_first"]),
    )
    engine = make_engine(
        cache=cache,
        max_total_tokens=rng.choice([256, 400, 1024]),
        max_running_requests=rng.choice([2, 6]),
        chunked_prefill_size=rng.choice([None, 40, 64]),
        build_cache=build_prefix_cache,
    )
    life = Life(engine, rng, tmp_path / "pages")
    life.run()
    assert_empty(engine)
    assert set(life.answers) == set(life.asked)
    identity = Identity()
    for rid, answer in life.answers.items():
        expected = llama.answer(life.asked[rid], max(1, len(answer.token_ids)))[: len(answer.token_ids)]
        identity.compare(life.asked[rid], expected, answer.token_ids, llama.logprobs_after)
    identity.assert_holds()
