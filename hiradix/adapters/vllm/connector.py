"""The class vLLM loads: its calls, translated for the two roles. Tested with vLLM 0.32.0."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from hiradix.adapters.admin import AdminCalls, AdminServer
from hiradix.adapters.vllm.events import HostEvents, Stored
from hiradix.adapters.vllm.layout import Grouping, Interior, Latent, grouping
from hiradix.adapters.vllm.names import refuse_ropes
from hiradix.adapters.vllm.orders import Orders, Outcome, WorkerFacts
from hiradix.adapters.vllm.resets import ResetWatch
from hiradix.adapters.vllm.scheduler import WISHES, SchedulerRole
from hiradix.adapters.vllm.scheduler_plan import Asked, OfferedState, SchedulerPlan, StepRequest
from hiradix.adapters.vllm.settings import Settings, check_write_policy, parse_settings, with_served_name
from hiradix.adapters.vllm.stats import HiRadixPromMetrics, HiRadixStats
from hiradix.adapters.vllm.support import (
    is_zeroed_early,
    refuse_options,
    refuse_write_back,
    roles_of,
    warn_if_untested,
)
from hiradix.adapters.vllm.worker import LIMITS, NOTHING
from hiradix.adapters.vllm.worker_factory import (
    BuiltWorker,
    KVGroup,
    WorkerPlan,
    build_worker,
    identity_of,
    model_name,
)
from hiradix.cache.host_index import HostIndex
from hiradix.config import ExtraConfig
from hiradix.errors import BadNamespace, CacheError, ConfigError, Misuse
from hiradix.intents import Receipt
from hiradix.intents.http import IntentApi
from hiradix.policy.eviction import make_order
from hiradix.policy.prefetch_policy import PrefetchPolicy
from hiradix.policy.write_policy import WritePolicy
from hiradix.prefix_cache import ModelIdentity
from hiradix.prefix_cache.attached import prefetch_limits
from hiradix.tree import RadixKey

logger = logging.getLogger(__name__)

SETTLE_S = 30.0  # longest that sleep waits for copies under way
TURN_S = 10.0  # longest that a wish waits for vLLM's scheduler to end its turn


def _prompt_key(tokens: list[int], extra_key: str | None, cache_salt: str | None) -> RadixKey:
    """The key of a prompt of text alone, which no adapter computed."""
    if extra_key is not None:
        raise BadNamespace("extra_key", "vLLM's adapters go by their files: name a tenant or everything")
    return RadixKey(tokens, cache_salt=cache_salt)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, once per step."""

    orders: Orders


NO_RESULTS = KVConnectorTransferResults(frozenset(), frozenset(), frozenset())


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, once per step."""

    outcomes: tuple[Outcome, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        if not isinstance(other, WorkerMetadata):
            raise Misuse(f"answers of another connector: {other}")
        return WorkerMetadata(self.outcomes + other.outcomes)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """A worker to the scheduler, once, when its pools are allocated."""

    facts: WorkerFacts


class HiRadixConnector(KVConnectorBase_V1, SupportsHMA):
    """Translates vLLM's connector calls for our two roles. One instance is one role; what belongs to the
    other is None."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # A load that failed is computed again; vLLM's own default would fail the request.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        refuse_options(vllm_config, kv_cache_config)
        refuse_ropes(vllm_config.model_config)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._grouping: Grouping = grouping(specs)
        settings = parse_settings(
            vllm_config.kv_transfer_config.kv_connector_extra_config, self._grouping.page_size
        )
        check_write_policy(settings, bool(vllm_config.cache_config.enable_prefix_caching))
        if settings.cache.hicache_write_policy == "write_back":
            refuse_write_back(vllm_config, kv_cache_config)
        self._settings: Settings = with_served_name(settings, model_name(vllm_config))
        self.scheduler: SchedulerRole | None = None
        self.worker: BuiltWorker | None = None
        self._failed_blocks: set[int] = set()
        self._orders = Orders()  # of the step under way
        self._is_gated = False  # layers must wait for loads of the step itself
        self.admin: AdminServer | None = None
        self._resets = ResetWatch()
        self._turn = threading.Lock()  # of vLLM's scheduler, and of wishes that come between its calls
        # A vLLM that tells nobody of its sleep may take the memory away after any step.
        sleeps = bool(getattr(vllm_config.model_config, "enable_sleep_mode", False))
        self._settles = (sleeps and not hasattr(KVConnectorBase_V1, "unregister_kv_caches")) or (
            is_zeroed_early(vllm_config, kv_cache_config)
        )
        if role is KVConnectorRole.SCHEDULER:
            warn_if_untested()
            self.scheduler = SchedulerRole(self._scheduler_plan(vllm_config))
            port = settings.admin_port_of(vllm_config.parallel_config.data_parallel_index)
            if port is not None:
                self.admin = AdminServer(
                    port,
                    AdminCalls(
                        self._ask,
                        self._shown,
                        settings.admin_api_key,
                        settings.attach_rules,
                        IntentApi(self._in_turn, _prompt_key),
                        self.scheduler.explanations if settings.cache.explain_names else None,
                    ),
                )

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # -- scheduler --------------------------------------------------------------------------

    def _scheduler_plan(self, vllm_config: VllmConfig) -> SchedulerPlan:
        cache, page_size = self._settings.cache, self._grouping.page_size
        order = make_order(cache.radix_eviction_policy, cache.radix_eviction_policy_config)
        limits = prefetch_limits(page_size, cache.hicache_storage_backend_extra_config)
        saves, loads = roles_of(vllm_config.kv_transfer_config)
        return SchedulerPlan(
            HostIndex(page_size, self._grouping.components, order),
            self._grouping.groups,
            vllm_config.parallel_config.world_size,
            loads_async(self._settings.load_mode, vllm_config, len(self._grouping.groups)),
            WritePolicy.from_name(cache.hicache_write_policy),
            PrefetchPolicy.from_name(cache.hicache_storage_prefetch_policy, limits),
            events=_events(vllm_config, self._kv_cache_config, self._grouping),
            stored=Asked(cache.hicache_storage_backend, cache.hicache_storage_backend_extra_config.opening),
            keeps_storage=self._settings.storage_after_reset == "same",
            no_regret=cache.is_no_regret,
            num_overlapping=vllm_config.max_concurrent_batches,
            limits=LIMITS,
            saves=saves,
            loads=loads,
            explain_names=cache.explain_names if self._settings.admin_port is not None else 0,
            eviction_policy=cache.radix_eviction_policy,
            intents=self._settings.intents,
        )

    def _ask(self, name: str | None, extra: ExtraConfig, policy: str | None) -> None:
        """Have storage attached or detached, as the admin endpoint was asked to. Any thread."""
        planner, prefetch = self._planner, None
        if name is not None:
            limits = prefetch_limits(self._grouping.page_size, extra)
            prefetch = PrefetchPolicy.from_name(policy or planner.prefetcher.policy.name, limits)
        planner.storage.ask(name, extra.when_serving().opening, prefetch)

    def _shown(self) -> dict[str, Any]:
        role = self._planner
        prefetch = {**vars(role.prefetch_figures), "missed": dict(role.index.counters.unfulfilled)}
        return {"is_attached": role.has_storage, **vars(role.figures), "prefetch": prefetch}

    def _in_turn(self, do: Callable[[Any], Any]) -> Any:
        """Run `do` on the table of wishes between two calls of vLLM's scheduler, and return its result. A new
        wish is begun at once and goes on with vLLM's steps, of which there are none while vLLM is idle.
        TimeoutError: no turn came."""
        if not self._turn.acquire(timeout=TURN_S):
            raise TimeoutError(f"vLLM's scheduler took its turn for {TURN_S:g} s")
        try:
            said = do(self._planner.intents)
            self._planner.apply_intents()
            return self._planner.intents.receipt(said.id) if isinstance(said, Receipt) else said
        finally:
            self._turn.release()

    @property
    def _planner(self) -> SchedulerRole:
        if self.scheduler is None:
            raise Misuse("a scheduler's call to a worker's connector")
        return self.scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        facts = [answer.facts for answer in metadata.values() if isinstance(answer, Handshake)]
        pages = [min(counts) for counts in zip(*(fact.num_pages for fact in facts), strict=True)]
        page_bytes = [max(sizes) for sizes in zip(*(fact.page_bytes for fact in facts), strict=True)]
        self._planner.open(pages, page_bytes, all(fact.has_storage for fact in facts))
        logger.info("hiradix: %s host pages of %d tokens", pages, self._grouping.page_size)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._settings.storage_after_reset == "apart":
            self._resets.bind(gpu_block_pool)

    def _follow_resets(self) -> None:
        """Reset the planner if vLLM has emptied its prefix cache. Call before anything is looked up, read or
        saved that may be older."""
        if self._resets.has_seen_one():
            self._planner.reset()

    def on_new_request(self, request: Any) -> None:
        with self._turn:
            self._follow_resets()
            self._planner.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        with self._turn:
            self._follow_resets()
            found = self._planner.lookup(request, num_computed_tokens)
        return found, bool(found) and self._planner.plan.load_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        with self._turn:
            self._planner.allocated(request, blocks.get_block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        with self._turn:
            return self._orders_of(scheduler_output)

    def _orders_of(self, scheduler_output: Any) -> StepMetadata:
        self._follow_resets()
        planner, cached = self._planner, scheduler_output.scheduled_cached_reqs
        state, copies = scheduler_output.kv_connector_block_state, scheduler_output.kv_cache_block_copies
        zeroed = getattr(scheduler_output, "new_block_ids_to_zero", None) or ()  # not by its requests alone
        is_quiet = not (
            scheduler_output.scheduled_new_reqs or copies or zeroed or state.boundary_state_offloads
        )
        if is_quiet and cached.req_ids and not any(cached.new_block_ids):
            counts = scheduler_output.num_scheduled_tokens
            rows = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            orders = planner.quiet_step([(one, computed + counts[one]) for one, computed in rows])
            if orders is not None:
                return StepMetadata(orders)
        scheduled = list(_scheduled(scheduler_output, self._grouping.page_size))
        filled = [*zeroed, *(target for _, target in copies or ())]
        return StepMetadata(planner.step(scheduled, state.resolve_block_ids, filled))

    def update_connector_output(self, connector_output: Any) -> None:
        answers = connector_output.kv_connector_worker_meta
        if answers is not None:
            with self._turn:
                self._planner.apply(answers.outcomes)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        with self._turn:
            told = self._planner.take_wishes(request)
            self._planner.finished(request, block_ids)
        return False, None if told is None else {WISHES: told}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def take_events(self) -> Iterable[KVCacheEvent]:
        with self._turn:
            return self._planner.take_events()

    def get_kv_connector_stats(self) -> HiRadixStats | None:
        if self.scheduler is not None:
            figures = self.scheduler.take_stats()
        else:
            figures = self._built.role.traffic.take() if self.worker is not None else {}
        return HiRadixStats(figures) if figures else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HiRadixStats:
        return HiRadixStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> HiRadixPromMetrics:
        return HiRadixPromMetrics(*args, **kwargs)

    def reset_cache(self) -> bool:
        with self._turn:
            self._resets.has_seen_one()  # the same one
            self._planner.reset()
        return True

    # -- worker -----------------------------------------------------------------------------

    @property
    def _built(self) -> BuiltWorker:
        if self.worker is None:
            raise Misuse("a worker's call before its KV caches were registered")
        return self.worker

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if not isinstance(connector_metadata, StepMetadata):
            raise Misuse(f"metadata of another connector: {connector_metadata}")
        self._orders = connector_metadata.orders

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker = build_worker(worker_plan(self), kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Handshake(self._built.facts)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if not isinstance(kv_connector_metadata, StepMetadata):
            raise Misuse(f"metadata of another connector: {kv_connector_metadata}")
        self._built.role.before_forward(kv_connector_metadata.orders)

    def has_connector_metadata(self) -> bool:
        """Whether attention layers must call this role: only if there are loads for the step."""
        return self._is_gated

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._is_gated = self._built.role.start_loads(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._built.role.wait_layer(self._built.layer_numbers[layer_name])

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Pages are saved whole, when the forward has been launched."""

    def wait_for_save(self) -> None:
        self._is_gated = False
        self._built.role.after_forward(self._orders)
        if self._settles and not self._built.role.settle(SETTLE_S):
            logger.warning("hiradix: copies of a step still run after %g s", SETTLE_S)

    def unregister_kv_caches(self) -> None:
        """Wait for all copies before vLLM sleeps, as its memory is about to be taken away. CacheError: some
        still run."""
        if self.worker is not None and not self._built.role.settle(SETTLE_S):
            raise CacheError(f"vLLM cannot sleep: copies of KV still run after {SETTLE_S:g} s")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        collected = self._built.role.collect(self._orders)
        self._failed_blocks = collected.failed_blocks
        if collected is NOTHING:
            return NO_RESULTS
        return KVConnectorTransferResults(finished_recving=collected.loaded, failed_recving=collected.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._failed_blocks

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        outcomes = self._built.role.take_outcomes()
        return WorkerMetadata(outcomes) if outcomes else None

    def shutdown(self) -> None:
        if self.admin is not None:
            self.admin.close()
        if self.scheduler is not None:
            self.scheduler.index.close()
        if self.worker is not None:
            self.worker.role.close(self._settings.drain_timeout_s)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Loads for the step itself are waited for layer by layer, in Python between graph pieces."""
        return bool(extra_config.get("load_mode", "auto") != "async")


def loads_async(mode: str, vllm_config: VllmConfig, num_groups: int) -> bool:
    """Whether loads run beside steps instead of with their own request's.

    With its own step a load is shorter, layer by layer beside the forward. But vLLM can take such a step back
    after a failed load only when it schedules no other step meanwhile and has one KV cache group.
    """
    overlaps = bool(vllm_config.max_concurrent_batches > 1)
    if mode == "sync" and (overlaps or num_groups > 1):
        why = "several KV cache groups" if num_groups > 1 else "overlapping steps (--no-async-scheduling)"
        raise ConfigError(f"load_mode sync: vLLM cannot compute a failed load again with {why}")
    return mode == "async" or (mode == "auto" and (overlaps or num_groups > 1))


def _events(vllm_config: VllmConfig, kv_cache_config: Any, grouping: Grouping) -> HostEvents | None:
    """The events of the host tier as vLLM publishes them; None if vLLM publishes no KV events."""
    listening = vllm_config.kv_events_config
    if listening is None or not listening.enable_kv_cache_events:
        return None
    page_size, group = grouping.page_size, grouping.groups[0]
    convert = maybe_convert_block_hash

    def stored(event: Stored) -> KVCacheEvent:
        return BlockStored(
            block_hashes=[convert(name) for name in event.hashes],
            parent_block_hash=None if event.parent is None else convert(event.parent),
            token_ids=list(event.token_ids),
            block_size=page_size,
            lora_id=event.lora.lora_int_id if event.lora else None,
            medium=MEDIUM_CPU,
            lora_name=event.lora.lora_name if event.lora else None,
            group_idx=group,
        )

    def removed(names: Sequence[bytes]) -> KVCacheEvent:
        return BlockRemoved(
            block_hashes=[convert(name) for name in names], medium=MEDIUM_CPU, group_idx=group
        )

    hash_size = getattr(kv_cache_config, "hash_block_size", None) or page_size
    return HostEvents(page_size, page_size // hash_size, stored, removed)


def worker_plan(connector: HiRadixConnector) -> WorkerPlan:
    """The settings of this rank's worker."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    config, groups = connector._vllm_config, connector._kv_cache_config.kv_cache_groups
    text = config.model_config.hf_text_config
    rank_r = getattr(text, "kv_lora_rank", None)
    latent = Latent(rank_r, text.qk_rope_head_dim) if rank_r else None
    settings = connector._settings
    full = groups[connector._grouping.groups[0]].kv_cache_spec
    identity = ModelIdentity("")  # no page leaves this process: no weights are read for a name
    if settings.may_store:
        stored = str(getattr(full, "dtype", config.model_config.dtype))
        identity = identity_of(config, settings.cache.served_model_name, stored)
    tp, pp = get_tp_group(), get_pp_group()
    return WorkerPlan(
        settings,
        connector._grouping,
        [KVGroup(group.kv_cache_spec, group.layer_names) for group in groups],
        connector._kv_cache_config.num_blocks,
        latent,
        replace(
            identity,
            tp_rank=tp.rank_in_group,
            tp_size=tp.world_size,
            pp_rank=pp.rank_in_group,
            pp_size=pp.world_size,
        ),
        config.parallel_config.world_size,
        _interior(config, full),
    )


def _interior(config: VllmConfig, spec: Any) -> Interior:
    """The layout inside a block of vLLM's kernels; of CPU kernels only the usual one is known here."""
    if config.device_config.device_type != "cpu" or not spec.head_size_v:
        return Interior.TOKENS
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        return Interior.OWN
    kernel = _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype)
    return Interior.K_THEN_V if kernel == "vec" else Interior.OWN


def _scheduled(output: Any, page_size: int) -> Iterable[StepRequest]:
    """The step's requests, with the blocks that vLLM gave them for it."""
    counts, offers = output.num_scheduled_tokens, output.kv_connector_block_state.boundary_state_offloads
    for new in output.scheduled_new_reqs:
        fresh = _fresh(new.block_ids, new.num_computed_tokens // page_size)
        yield StepRequest(new.req_id, counts[new.req_id], fresh, _states(offers, new.req_id))
    cached = output.scheduled_cached_reqs
    rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
    for request_id, table, computed in rows:
        first = computed // page_size if table and request_id in cached.resumed_req_ids else 0
        fresh = _fresh(table or (), first)
        yield StepRequest(request_id, counts[request_id], fresh, _states(offers, request_id))


def _states(offers: Mapping[str, Sequence[tuple[int, int, int]]], request_id: str) -> list[OfferedState]:
    return [OfferedState(*offer) for offer in offers.get(request_id, ())]


def _fresh(table: Iterable[list[int]], first_page: int) -> list[int]:
    return [block for blocks in table for block in blocks[first_page:]]
