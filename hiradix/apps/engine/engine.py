"""The reference engine: one object, one thread, one `step()` at a time.

step:  apply finished transfers -> plan -> start load backs -> forward -> sample -> share, finish
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hiradix.apps.engine.api import (
    FINISH_ABORT,
    EngineBusy,
    EngineConfig,
    EngineInfo,
    Output,
    RequestError,
    SamplingParams,
    Scope,
)
from hiradix.apps.engine.canary import computed_pages
from hiradix.apps.engine.checks import check_conservation
from hiradix.apps.engine.model import PagedModel
from hiradix.apps.engine.output_builder import OutputBuilder
from hiradix.apps.engine.packing import Work
from hiradix.apps.engine.pools import EnginePools, build_pools
from hiradix.apps.engine.rank_storage import Attach, attach_on_ranks, clear_on_ranks, open_timeout_s
from hiradix.apps.engine.request import Request
from hiradix.apps.engine.request_wishes import RequestWishes
from hiradix.apps.engine.scheduler import ScheduledTokens, Scheduler, SchedulerLimits
from hiradix.apps.engine.slots import free_tokens
from hiradix.apps.engine.states import NO_STATES, NoStates, StateSlots
from hiradix.apps.engine.tensor_parallel import LoadGates
from hiradix.apps.engine.tokenizer import Tokenizer
from hiradix.apps.engine.turns import Turns
from hiradix.config import HiCacheConfig
from hiradix.errors import Misuse
from hiradix.events import KVEventsConfig, open_publisher
from hiradix.intents.http import IntentApi, IntentBody, IntentReply
from hiradix.memory import DevicePool
from hiradix.policy.admission import make_admission
from hiradix.policy.no_regret import NoRegret
from hiradix.policy.prices import Prices
from hiradix.prefix_cache import (
    CacheInitParams,
    ComputedPages,
    ModelIdentity,
    PrefixCache,
    build_hybrid_cache,
    build_prefix_cache,
    model_identity,
    run_with,
)
from hiradix.storage import no_adapters
from hiradix.transfer.process_group import ProcessGroup
from hiradix.tree import RadixKey

if TYPE_CHECKING:
    from hiradix.events.publisher import Publisher

BuildCache = Callable[[HiCacheConfig, CacheInitParams, DevicePool, ModelIdentity], PrefixCache]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Engine:
    """Serves a model through a prefix cache. All methods belong to one thread; see EngineThread for more.

    `cache` is the prefix cache, `tokenizer` None where the model directory
    has none. Building it loads the weights and allocates the pools; raises ConfigError naming the value.

    group: the ranks of a tensor parallel model. All of them must make the same calls in the same order
    (see `hiradix.apps.engine.ranks`), and get the same outputs; RankLost when one is gone.
    """

    def __init__(
        self,
        config: EngineConfig,
        build_cache: BuildCache = build_prefix_cache,
        group: ProcessGroup | None = None,
    ):
        self.config = config
        if config.num_threads is not None or config.device == "cpu":
            torch.set_num_threads(config.num_threads or 1)
        self._model = PagedModel(
            config.model_path, _DTYPES[config.dtype], config.device, group, config.context_length
        )  # fmt: skip
        self.model_name = config.model_name or Path(config.model_path).resolve().name
        self.tokenizer = Tokenizer.find(config.model_path)
        self.context_length = self._model.context_length
        kinds = self._model.windows if self._model.states is None else self._model.states
        self._pools = build_pools(config, self._model.shape, kinds, self.context_length)
        self.cache: PrefixCache = self._build_cache(build_cache, group)
        self._intents = IntentApi(lambda ask: ask(self.cache.cache.intents))
        self._wishes = RequestWishes(self.cache)
        self._wakeup = threading.Event()
        self.cache.set_wakeup(self._wakeup.set)
        limits = _limits(config, self._pools)
        self._states = _state_slots(self.cache, self._pools)
        self._scheduler = Scheduler(
            self.cache, self._pools.allocator, self._pools.rows, limits, self._turns(group), self._states
        )  # fmt: skip
        ends = self._model.stop_token_ids
        self.grammars = None
        if self.tokenizer is not None:
            self.grammars = self.tokenizer.grammars(ends, self._model.vocab_size)
        self._answers = OutputBuilder(ends, self.tokenizer, self.grammars, config.seed, self._model.device)
        self._ended: list[Output] = []
        self._open_timeout_s = None if group is None else open_timeout_s(group.timeout_s)
        self._gates = LoadGates(self.cache.layer_done_counter, group)
        self._check = config.check
        self.is_blocked = False
        self.num_steps = 0
        self.publisher: Publisher | None = None  # of KV events

    # -- requests -----------------------------------------------------------------------

    def add_request(
        self, rid: str, prompt_ids: Sequence[int], params: SamplingParams, scope: Scope | None = None
    ) -> None:
        """Queue a request; its Outputs come from later steps. Its answer is cut to what the context holds.

        Raises RequestError when it can never be served, EngineBusy when the waiting queue is full.
        """
        self._validate(rid, prompt_ids, params)
        if self._scheduler.is_full:
            raise EngineBusy(f"{len(self._scheduler.waiting)} requests are waiting; the queue is full")
        request = Request(rid, prompt_ids, params, scope or Scope())
        room = min(self.context_length - len(prompt_ids), self._pools.num_tokens - len(prompt_ids) + 1)
        request.max_new_tokens = min(params.max_new_tokens, room)
        self._answers.begin(request)
        self._scheduler.add(request)

    def abort(self, rid: str) -> bool:
        """End a request in whatever state it is; the next step has its last Output. False if unknown."""
        request = self._scheduler.remove(rid)
        if request is None:
            return False
        self._wishes.drop(request)
        self._ended.append(self._answers.end(request, FINISH_ABORT))
        return True

    def _validate(self, rid: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        num_tokens, capacity = len(prompt_ids), self._pools.num_tokens
        if num_tokens == 0:
            raise RequestError("the prompt is empty")
        if num_tokens >= self.context_length:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, but the context length is {self.context_length} tokens "
                "including at least one of the answer"
            )
        if num_tokens > capacity:
            raise RequestError(f"the prompt has {num_tokens} tokens, but the device pool holds {capacity}")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self._model.vocab_size:
            raise RequestError(f"the prompt has token ids outside 0..{self._model.vocab_size - 1}")
        if self.tokenizer is None and (params.stop or params.grammar or any(params.tool_markers)):
            name = "stop: stop strings need" if params.stop else "grammar: structured output needs"
            raise RequestError(f"{name} a tokenizer, and the model directory has none")
        ids = [*(token for token, _ in params.logit_bias), *params.stop_token_ids]
        if ids and not 0 <= min(ids) <= max(ids) < self._model.vocab_size:
            name = "logit_bias" if params.logit_bias else "stop_token_ids"
            raise RequestError(f"{name}: has token ids outside 0..{self._model.vocab_size - 1}")
        if self._scheduler.find(rid) is not None:
            raise RequestError(f"a request with id {rid!r} is being served already")

    # -- the loop -----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do or to hand out (transfers aside)."""
        return bool(self._ended or self._scheduler.running or self._scheduler.waiting)

    def is_idle(self) -> bool:
        """No request anywhere and no transfer under way."""
        return not self.has_work and not self.cache.is_transferring

    def step(self) -> list[Output]:
        """Run one pass over what fits, and return what it produced; cheap when there is nothing to do.

        Sets `is_blocked` when requests wait for transfers only: the caller should then `wait`.
        """
        self.cache.check_hicache_events()
        parts = self._scheduler.plan()
        self._gates.add(self.cache.ready_to_load_host_cache())
        outputs, self._ended = self._ended, []
        if parts:
            outputs += self._run(parts)
            self.num_steps += 1
            if not self.has_work:
                self.cache.ready_to_load_host_cache()  # no further step comes that starts this one's writes
        self.is_blocked = not parts and self.has_work
        running = self._scheduler.running
        self.cache.check_conservation(sum(r.num_allocated - r.cache_protected_len for r in running))
        if self._check:
            check_conservation(self.cache, self._pools.allocator, self._scheduler, self._pools.states)
        if self.publisher is not None:
            self.publisher.flush()
        return outputs

    def wait(self, timeout_s: float) -> None:
        """Sleep until a transfer has finished, `notify` is called, or the time is over."""
        if self._wakeup.wait(timeout_s):
            self._wakeup.clear()

    def notify(self) -> None:
        """End a `wait`; the one method any thread may call."""
        self._wakeup.set()

    def _run(self, parts: list[ScheduledTokens]) -> list[Output]:
        """Forward and sample `parts`; when a load they wait for fails, its readers wait again instead."""
        work = [self._work(part) for part in parts]
        waits, start_s = self._gates.is_waiting, time.perf_counter()
        pools = self._pools
        logits = self._gates.run(lambda own: self._model.forward(work, pools.of_pass(own)), pools.all)
        if logits is None:
            for part in reversed(parts):
                if part.admitted:
                    self._scheduler.undo_admission(part.request)
            return []
        self._model.commit()
        ends = list(accumulate(one.num_logits for one in work))
        for one, end in zip(parts, ends, strict=True):
            if one.request.num_unscored:
                self._answers.score_prompt(
                    one.request, logits[:end], one.request.num_computed + one.num_tokens
                )
        rows = [row for row, part in enumerate(parts) if self._scheduler.computed(part)]
        requests = [parts[row].request for row in rows]
        outputs = self._answers.extend(requests, logits[[ends[row] - 1 for row in rows]]) if rows else []
        num_tokens = sum(part.num_tokens for part in parts)
        if not waits and rows and num_tokens >= 2 * len(parts):
            self.cache.note_prefill(num_tokens, time.perf_counter() - start_s)
        return [self._answered(*pair) for pair in zip(requests, outputs, strict=True)]

    def _answered(self, request: Request, output: Output) -> Output:
        """A token was sampled; with the last one the request ends, and its wishes are answered."""
        self._scheduler.answered(request)
        self._wishes.begin(request)
        if output.finish_reason is None:
            return output
        self._scheduler.finish(request, output.finish_reason)
        told = self._wishes.end(request)
        return replace(output, usage=replace(output.usage, wishes=told)) if told else output

    def _work(self, part: ScheduledTokens) -> Work:
        request = part.request
        end = request.num_computed + part.num_tokens
        tokens, state = request.tokens(request.num_computed, end), self._states.use(request, part.num_tokens)
        num_logits = part.num_tokens if request.num_unscored else 1
        return Work(tokens, end, self._scheduler.row(request), state, num_logits)

    def publish_events(self, config: KVEventsConfig, host: str = "*") -> None:
        """Publish from here on what is in which tier; before the first request.

        host: what `*` in an endpoint stands for. Raises ConfigError naming the key of `--kv-events-config`.
        """
        self.publisher = open_publisher(config, self.cache.tree, host, lambda: self.cache.storage_name)

    # -- administration -----------------------------------------------------------------

    def flush(self) -> bool:
        """Empty the device and host tiers (storage keeps what it has). False unless idle."""
        if not self.is_idle():
            return False
        self.cache.reset()
        return True

    def attach_storage(
        self,
        name: str,
        extra_config_json: str | None = None,
        prefetch_policy: str | None = None,
        write_policy: str | None = None,
    ) -> tuple[bool, str]:
        """Attach a storage backend while serving; (ok, message). Refused unless idle."""
        if (refused := self.refusal("attach")) is not None:
            return False, refused
        if self._open_timeout_s is not None and self.cache.has_host:
            asked = Attach(name, extra_config_json, prefetch_policy, write_policy)
            return attach_on_ranks(self.cache.attached, asked, self._open_timeout_s)
        return self.cache.attach_storage_backend(
            name, extra_config_json, self.model_name, prefetch_policy, write_policy
        )

    def detach_storage(self) -> tuple[bool, str]:
        """Detach and close the storage backend; (ok, message). Refused unless idle; may be repeated."""
        if (refused := self.refusal("detach")) is not None:
            return False, refused
        return self.cache.detach_storage_backend()

    def clear_storage(self) -> bool:
        """Delete this model's pages from storage; False when there is none or it failed."""
        if self._open_timeout_s is not None and self.cache.has_host:
            return clear_on_ranks(self.cache.attached, self._open_timeout_s)
        return self.cache.clear_storage_backend()

    def hint(self, prompt_ids: Sequence[int], scope: Scope) -> int:
        """Tell the eviction policy `scope.hint` of a conversation; its cached tokens."""
        if scope.hint is None:
            raise RequestError("hint: says nothing of the conversation")
        if scope.hint == "end_of_session":
            self._scheduler.turns.session_ended(prompt_ids, scope)
        key = RadixKey(list(prompt_ids), scope.extra_key, cache_salt=scope.cache_salt)
        if scope.hint == "end_of_session":
            self._wishes.end_session(key, scope.session)
        return self.cache.hint(key, scope.hint)

    def answer_intent(self, method: str, path: str, body: IntentBody, asked_by: str) -> IntentReply:
        """Answer a request to one of the paths of `hiradix.intents.http`; its wish is applied with the next
        step."""
        return self._intents.answer(method, path, body, asked_by)

    def drain(self, timeout_s: float) -> bool:
        """Let transfers under way end; False if the deadline passed first."""
        return self.cache.drain(timeout_s)

    def refusal(self, verb: str) -> str | None:
        """The reason to refuse an operation that asks for an idle engine now, None if it is idle."""
        if self.is_idle():
            return None
        waiting, running = len(self._scheduler.waiting), len(self._scheduler.running)
        return f"Reject {verb}: scheduler is not idle. #queue-req={waiting} #running-req={running}"

    def info(self) -> EngineInfo:
        """Sizes and load now."""
        config, pools = self.config, self._pools
        return EngineInfo(
            model_name=self.model_name,
            model_path=config.model_path,
            dtype=config.dtype,
            device=config.device,
            page_size=config.cache.page_size,
            context_length=self.context_length,
            vocab_size=self._model.vocab_size,
            kv_bytes_per_token=pools.bytes_per_token,
            max_total_tokens=pools.num_tokens,
            available_tokens=free_tokens(pools.allocator),
            evictable_tokens=self.cache.full_evictable_size(),
            protected_tokens=self.cache.full_protected_size(),
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_retractions=self._scheduler.num_retractions,
            num_steps=self.num_steps,
            storage_attached=self.cache.enable_storage,
            schedule_policy=config.schedule_policy,
            num_sessions_in=self._scheduler.turns.policy.num_in,
            num_late=self._scheduler.turns.controller.num_late,
        )

    def close(self, timeout_s: float = 10.0) -> None:
        """Drop all requests, stop the transfer threads within the deadline and close storage."""
        for request in [*self._scheduler.waiting, *self._scheduler.running]:
            self._scheduler.remove(request.rid)
        self.cache.close(timeout_s)
        if self.publisher is not None:
            self.publisher.close(timeout_s)

    # -- construction -------------------------------------------------------------------

    def _turns(self, group: ProcessGroup | None) -> Turns:
        """The order of service. Ranks read rank 0's clock, and without a host tier, which is where they agree on
        what computing costs, no measured prices."""
        cache, capacity = self.cache, self._pools.num_tokens
        if cache.has_host:
            capacity = max(capacity, cache.stats().host_total)
        policy = make_admission(self.config.schedule_policy, capacity)
        is_agreed = group is None or cache.has_host
        prices = Prices(cache.no_regret if is_agreed else NoRegret(False), self.config.cache.page_size)
        return Turns(policy, cache, prices, time.monotonic if group is None else rank_0s_clock(group))

    def _build_cache(self, build_cache: BuildCache, group: ProcessGroup | None) -> PrefixCache:
        config, pools = self.config.cache, self._pools
        asked = config.enable_hierarchical_cache and config.hicache_storage_identity is None
        with computed_pages(self._model, pools) if asked else nullcontext() as witness:
            return self._cache_over(build_cache, self._cache_params(group, witness), group)

    def _cache_params(self, group: ProcessGroup | None, witness: ComputedPages | None) -> CacheInitParams:
        config, pools = self.config.cache, self._pools
        return CacheInitParams(
            disable=config.disable_radix_cache,
            req_to_token_pool=pools.rows,
            token_to_kv_pool_allocator=pools.allocator,
            page_size=config.page_size,
            eviction_policy=config.radix_eviction_policy,
            eviction_policy_config=dict(config.radix_eviction_policy_config),
            sliding_window_size=pools.window,
            state_records=pools.states,
            agree=None if group is None else group.least,
            witness=witness,
            adapter_of=no_adapters,
            explain_names=config.explain_names,
            intents=self.config.intents,
        )

    def _cache_over(
        self, build_cache: BuildCache, params: CacheInitParams, group: ProcessGroup | None
    ) -> PrefixCache:
        config, pools = self.config.cache, self._pools
        # What stays on the device has no name: no weights are read for one.
        is_named = config.enable_hierarchical_cache
        identity = ModelIdentity(self.model_name)
        if is_named:
            identity = model_identity(self.config.model_path, self.model_name)
        identity = run_with(identity, {"rope": self._model.fixed_rope})
        if pools.hybrid is not None:
            return build_hybrid_cache(config, params, pools.hybrid, _share_of(identity, group))
        return build_cache(config, params, pools.device, _share_of(identity, group))


def rank_0s_clock(group: ProcessGroup, clock: Callable[[], float] = time.monotonic) -> Callable[[], float]:
    """Rank 0's clock on all ranks: a collective call each time."""
    return lambda: float(group.share(clock() if group.rank == 0 else None))


def _limits(config: EngineConfig, pools: EnginePools) -> SchedulerLimits:
    return SchedulerLimits(
        max_running=config.max_running_requests,
        max_waiting=config.max_waiting_requests,
        chunk_tokens=config.chunked_prefill_size,
        page_size=config.cache.page_size,
        window=pools.window,
    )


def _state_slots(cache: PrefixCache, pools: EnginePools) -> StateSlots | NoStates:
    if pools.states is None:
        return NO_STATES
    if not cache.supports_mamba():
        raise Misuse(f"{cache} for a model with states")
    return StateSlots(cache, pools.states, pools.device.page_size)


def _share_of(model: ModelIdentity, group: ProcessGroup | None) -> ModelIdentity:
    return model if group is None else replace(model, tp_rank=group.rank, tp_size=group.size)
