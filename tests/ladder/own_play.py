"""Our own engine in a process, as the ladder asks it.

python -m tests.ladder.own_play '{"model": folder, "pages": folder, "cache": {HiCacheConfig's fields}, "engine":
{EngineConfig's}, "fault": file}'
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hiradix.apps.engine import Engine, EngineConfig, Output, SamplingParams
from hiradix.config import ExtraConfig, HiCacheConfig
from hiradix.prefix_cache import EvictParams
from tests.ladder import planted, store
from tests.ladder.climb import ABORT_STEPS
from tests.puppet import obey

TOP = 5
SETTLE_S = 120.0
ALL = 1 << 30


class Play:
    """The engine and what can be asked of it. Every answer is plain data."""

    def __init__(self, setup: dict[str, Any]) -> None:
        store.register()
        planted.plant(Path(setup["fault"]))
        cache = dict(setup["cache"])
        extra = ExtraConfig.from_mapping(cache.pop("hicache_storage_backend_extra_config", {}))
        config = HiCacheConfig(**cache, hicache_storage_backend_extra_config=extra)
        self.engine = Engine(EngineConfig(setup["model"], model_name="tiny", cache=config, **setup["engine"]))
        self._numbers = 0

    def _add(self, prompt: Sequence[int], max_tokens: int) -> str:
        self._numbers += 1
        params = SamplingParams(max_new_tokens=max_tokens, ignore_eos=True, logprobs=TOP)
        self.engine.add_request(f"r{self._numbers}", prompt, params)
        return f"r{self._numbers}"

    def _step(self, said: dict[str, list[Output]]) -> None:
        for output in self.engine.step():
            said.setdefault(output.rid, []).append(output)
        if self.engine.is_blocked:
            self.engine.wait(1.0)

    def answer(self, prompts: list[list[int]], max_tokens: int) -> Any:
        """One after the other: tokens, log probabilities, and cached prompt tokens by tier."""
        return [self._alone(prompt, max_tokens) for prompt in prompts]

    def _alone(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        said: dict[str, list[Output]] = {}
        rid = self._add(prompt, max_tokens)
        while self.engine.has_work:
            self._step(said)
        return _answer(said[rid])

    def crowd(self, prompts: list[list[int]], max_tokens: int, keep: int) -> Any:
        """All at once; all but every `keep`-th are aborted. The kept answers by number."""
        rids = [self._add(prompt, max_tokens) for prompt in prompts]
        doomed = [rid for number, rid in enumerate(rids) if number % keep]
        said: dict[str, list[Output]] = {}
        steps = 0
        while self.engine.has_work:
            self._step(said)
            steps += 1
            if doomed and steps % ABORT_STEPS == 0:
                self.engine.abort(doomed.pop(steps % len(doomed)))
        return {number: _answer(said[rid]) for number, rid in enumerate(rids) if number % keep == 0}

    def settle(self) -> Any:
        """Until all that was computed is on the host and in storage."""
        deadline = time.monotonic() + SETTLE_S
        while not self.engine.is_idle():
            assert time.monotonic() < deadline, f"never idle: {self.engine.info()}"
            self.engine.wait(0.1)
            self.engine.step()
        return True

    def forget(self, host: bool = False) -> Any:
        """Empty the device, and the host if told so."""
        if host:
            assert self.engine.flush()
        else:
            self.engine.cache.evict(EvictParams(num_tokens=ALL, swa_num_tokens=ALL, mamba_num=ALL))
        return True

    def preempted(self) -> Any:
        """How often a running request had to give its pages up."""
        return self.engine.info().num_retractions

    def stop(self) -> Any:
        self.settle()
        self.engine.close()
        return True


def _answer(outputs: Sequence[Output]) -> dict[str, Any]:
    last = outputs[-1]
    assert last.finish_reason == "length", last
    usage = last.usage
    return {
        "tokens": [token for output in outputs for token in output.token_ids],
        "logprobs": [
            {str(token): value for token, value in (*one.top, (one.token_id, one.logprob))}
            for output in outputs
            for one in output.logprobs
        ],
        "device": usage.cached_device,
        "host": usage.cached_host,
        "storage": usage.cached_storage,
    }  # fmt: skip


if __name__ == "__main__":
    obey(Play(json.loads(sys.argv[1])))
