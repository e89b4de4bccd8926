"""What copies cost the engine's own thread: one wake in a step. What it leaves when nobody asks any more."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from hiradix.apps.engine import Engine, SamplingParams
from hiradix.prefix_cache import build_prefix_cache
from hiradix.transfer import Runtime, StepDriver
from tests.engine.checkpoints import prompts
from tests.engine.configs import TIERED
from tests.engine.conftest import MakeEngine


class Counted(StepDriver):
    """Counts the wakes that the engine's thread pays for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_wakes = 0
        self.stepping = False

    def wake(self, worker: Any, follower: Any = None) -> None:
        self.num_wakes += not self.stepping
        super().wake(worker, follower)

    def step(self) -> bool:
        self.stepping = True
        try:
            return super().step()
        finally:
            self.stepping = False


def stepped(make_engine: MakeEngine, driver: StepDriver, **fields: Any) -> Engine:
    runtime = Runtime(driver=driver, clock=driver.now)
    build_cache = partial(build_prefix_cache, runtime=runtime)
    return make_engine(cache=TIERED, build_cache=build_cache, max_total_tokens=256, **fields)


def num_written(engine: Engine) -> int:
    cache: Any = engine.cache
    return int(cache.cache.counters.written)


@pytest.mark.parametrize("num_requests", [1, 3])
def test_writes_start_when_the_last_request_has_ended(make_engine: MakeEngine, num_requests: int) -> None:
    driver = StepDriver()
    engine = stepped(make_engine, driver)
    for turn in range(3):  # threads are there, and asleep, from the second on
        for number, prompt in enumerate(prompts([40 + turn] * num_requests, seed=turn)):
            engine.add_request(f"{turn} {number}", prompt, SamplingParams(max_new_tokens=1))
        while engine.has_work:
            engine.step()
        assert engine.cache.ongoing_write_through, "nothing was to be written"
        before = num_written(engine)
        driver.run()
        assert driver.num_overslept == 0, "nobody started what the last step wrote"
        engine.cache.check_hicache_events()
        assert not engine.cache.ongoing_write_through and num_written(engine) >= before + 5 * num_requests


def test_a_step_wakes_one_thread(make_engine: MakeEngine) -> None:
    """Whatever is loaded for it, and however many requests ended in the one before."""
    driver = Counted()
    engine = stepped(make_engine, driver, max_running_requests=3)
    talks, wakes = prompts([40, 47, 54, 61, 68], seed=7), []
    for turn in range(4):
        for number, talk in enumerate(talks):
            engine.add_request(f"{turn} {number}", talk, SamplingParams(max_new_tokens=2))
        while engine.has_work:
            driver.num_wakes = 0
            for output in engine.step():
                talks[int(output.rid.split()[1])] += output.token_ids
            if turn:  # in the first nothing is loaded: its last step starts the writes of two steps
                wakes.append(driver.num_wakes)
            while driver.step():
                pass
    cache: Any = engine.cache
    assert cache.cache.counters.loaded and cache.cache.counters.written
    assert max(wakes) == 1
