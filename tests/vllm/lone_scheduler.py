"""vLLM's real scheduler without a model: requests in, steps counted in simulated seconds, nothing computed."""

from __future__ import annotations

import itertools
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

STEP_S = 0.01
_CONFIGS: dict[str, Any] = {}  # making one takes a second


class Lone:
    """kind: the scheduler class. A step takes STEP_S and `token_s` for each of its tokens.

    first_s: by request, seconds from its arrival to its first token. As many steps are planned ahead as vLLM
    has under way.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, model: Path, kind: Any, num_blocks: int = 100, block: int = 16,
        token_s: float = 1e-3, is_async: bool = False, **engine: Any,
    ) -> None:  # fmt: skip
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from hiradix.adapters.vllm import scheduler_class

        self.now_s, self.token_s = 1000.0, token_s
        monkeypatch.setattr(scheduler_class.time, "monotonic", lambda: self.now_s)
        args = {"max_model_len": 2048, "block_size": block, "enable_prefix_caching": True} | engine
        config = _CONFIGS.get(str(args))
        if config is None:
            config = _CONFIGS[str(args)] = EngineArgs(model=str(model), **args).create_engine_config()
        config.cache_config.num_gpu_blocks = num_blocks
        config.scheduler_config.async_scheduling = is_async
        self.num_ahead = 2 if is_async else 1
        spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=16, dtype=torch.float32)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block, sha256)
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=_NoGrammars(),
            block_size=block,
            hash_block_size=block,
            log_stats=False,
        )
        self._steps: deque[Any] = deque()
        self._arrived: dict[str, float] = {}
        self._first = iter(itertools.count(1))
        self.first_s: dict[str, float] = {}
        self.ended: dict[str, Any] = {}
        self.preempted = 0

    def add(self, rid: str, prompt: list[int], max_tokens: int = 4, **said: Any) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        tenant = said.pop("tenant", None)
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args=tenant and {"tenant": tenant}
        )
        request = Request(rid, prompt, params, None, block_hasher=self._hasher, **said)
        self._arrived[rid] = self.now_s
        self.scheduler.add_request(request)

    def abort(self, rid: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(rid, RequestStatus.FINISHED_ABORTED)

    def step(self) -> int:
        """Plan one more step, and end the oldest where as many are under way as may be. Tokens planned."""
        output = self.scheduler.schedule()
        self.preempted += len(output.preempted_req_ids or ())
        self._steps.append(output)
        if len(self._steps) >= self.num_ahead:
            self._end_step(self._steps.popleft())
        return int(output.total_num_scheduled_tokens)

    def _end_step(self, output: Any) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        self.now_s += STEP_S + self.token_s * output.total_num_scheduled_tokens
        rids = list(output.num_scheduled_tokens)
        sampled = [[next(self._first) % 400 + 3] if self._samples(rid, output) else [] for rid in rids]
        answer = ModelRunnerOutput(rids, {rid: at for at, rid in enumerate(rids)}, sampled)
        for outputs in self.scheduler.update_from_output(output, answer).values():
            for one in outputs.outputs:
                if one.new_token_ids:
                    self.first_s.setdefault(one.request_id, self.now_s - self._arrived[one.request_id])
                if one.finish_reason is not None:
                    self.ended[one.request_id] = str(one.finish_reason)

    def _samples(self, rid: str, output: Any) -> bool:
        """Whether a request's tokens are all computed when this step has ended."""
        request = self.scheduler.requests.get(rid)
        if request is None:
            return False
        new = [one for one in output.scheduled_new_reqs if one.req_id == rid]
        cached = output.scheduled_cached_reqs
        begin = new[0].num_computed_tokens if new else cached.num_computed_tokens[cached.req_ids.index(rid)]
        known = request.num_prompt_tokens + request.num_output_tokens
        return bool(begin + output.num_scheduled_tokens[rid] >= known)

    def run(self, most_steps: int = 10_000) -> None:
        """Until all requests have ended."""
        for _ in range(most_steps):
            if self.scheduler.has_unfinished_requests():
                self.step()
            elif self._steps:
                self._end_step(self._steps.popleft())
            else:
                return
        raise AssertionError(f"{self.scheduler.get_request_counts()} after {most_steps} steps")

    def agents(self, prompts: dict[str, list[list[int]]], think_s: float, is_named: bool) -> None:
        """Each session asks its prompts one after the other, `think_s` after the answer before."""
        left = {name: list(enumerate(turns)) for name, turns in prompts.items()}
        due_s = {name: self.now_s + 0.1 * at for at, name in enumerate(prompts)}
        while due_s or self.scheduler.has_unfinished_requests():
            for name in [name for name, at_s in due_s.items() if at_s <= self.now_s]:
                del due_s[name]
                number, prompt = left[name].pop(0)
                self.add(f"{name}/{number}", prompt, **({"session_id": name} if is_named else {}))
            if not self.scheduler.has_unfinished_requests():
                self.now_s = min(due_s.values())
                continue
            before = set(self.ended)
            self.step()
            for rid in self.ended.keys() - before:
                if left[name := rid.partition("/")[0]]:
                    due_s[name] = self.now_s + think_s

    def order(self) -> list[str]:
        """Requests by when their first tokens came."""
        return sorted(self.first_s, key=lambda rid: self._arrived[rid] + self.first_s[rid])

    def assert_nothing_is_left(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.requests and not len(scheduler.waiting) and not scheduler.running
        assert not scheduler._admission._requests and not scheduler._admission.policy.waiting
        assert not scheduler._admission._active and not scheduler._prefilling
        assert not scheduler._queue_prices._found
        assert scheduler.kv_cache_manager.usage == 0


class _NoGrammars:
    """Structured output is not used."""

    def accept_tokens(self, *args: Any) -> bool:
        return True

    def should_advance(self, *args: Any) -> bool:
        return False
