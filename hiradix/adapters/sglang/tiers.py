"""The prefix cache for SGLang 0.5.23 with host and storage: what its scheduler asks of lower tiers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence, Sized
from contextlib import suppress
from typing import Any

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

from hiradix.adapters.admin import PORT_ENV, AdminCalls, AdminServer
from hiradix.adapters.scheduled_calls import ScheduledCalls
from hiradix.adapters.sglang.cache import HiRadixPrefixCache
from hiradix.adapters.sglang.engine_views import ControllerView, HostPoolView
from hiradix.adapters.sglang.explained import RequestExplainer
from hiradix.adapters.sglang.lora_adapters import NO_ADAPTERS, LoraAdapters
from hiradix.adapters.sglang.metrics_feed import MetricsFeed
from hiradix.adapters.sglang.weights import UNSEEN, Weights
from hiradix.cache.pages import BACKBONE
from hiradix.config import ExtraConfig, parse_extra_config
from hiradix.errors import CacheError, ConfigError, Misuse
from hiradix.intents.http import IntentApi
from hiradix.prefix_cache import PrefixCache, RadixKey
from hiradix.prefix_cache.attached import DETACH_TIMEOUT_S
from hiradix.prefix_cache.lower_tiers import NamedStorage
from hiradix.storage.attach.rules import AttachRefused, AttachRules, in_log, over_http
from hiradix.transfer.process_group import place_in
from hiradix.tree import Node
from hiradix.tree.key import as_tokens

logger = logging.getLogger(__name__)
audit_log = logging.getLogger("hiradix.audit")


class HiRadixHostCache(HiRadixPrefixCache):
    """`HiRadixPrefixCache` over device, host and storage. Named in SGLang's log line `impl=`.

    controller: what SGLang sees as this cache's `cache_controller`.
    """

    hicache_storage_pass_prefix_keys = False  # storage gets them from the transfer workers, not from SGLang

    def __init__(
        self,
        params: Any,
        inner: PrefixCache,
        controller: ControllerView,
        adapters: LoraAdapters = NO_ADAPTERS,
    ):
        self._attached = inner.attached
        super().__init__(params, inner, adapters)
        self.cache_controller = controller
        self.token_to_kv_pool_host = HostPoolView(inner.cache.supply.host_pools[BACKBONE], self.page_size)
        self._meters = MetricsFeed(self, params.enable_metrics)
        self._checks = os.environ.get("HIRADIX_CHECK") == "1"
        self._has_unclaimed_load = False
        self._is_alone = place_in(params.attn_tp_cache_group or params.tp_cache_group)[1] == 1
        self._was_asked = False  # whether it is idle, since the last step
        if inner.cache.prefetcher is None:
            raise Misuse(f"{inner} has no tiers below the device")
        self._prefetcher = inner.cache.prefetcher
        self.explainer: RequestExplainer | None = None
        if inner.cache.misses is not None:
            self.explainer = RequestExplainer(inner.cache.misses, self._prefetcher)
        self._weights = UNSEEN
        self._extra = ExtraConfig()  # of the storage that is attached
        self.attach_rules = AttachRules()
        self.read_attach_rules: Callable[[], AttachRules] = AttachRules
        self.calls = ScheduledCalls()  # wishes that other threads bring
        self.admin: AdminServer | None = None
        self._to_reopen: str | None = None  # for pages of other weights, when its calls have ended
        self.show_storage()

    def watch(self, weights: Weights, extra: ExtraConfig) -> None:
        """Have pages of other weights stored under other names. extra: of the storage attached at start."""
        self._weights, self._extra = weights, extra

    def listen(self, port: int, api_key: str | None) -> None:
        """Take wishes and questions on 127.0.0.1 from here on: see `hiradix.adapters.admin`.

        Raises ConfigError when the port is taken, there is no key, or other ranks would have to be told.
        """
        if not api_key:
            raise ConfigError(f"{PORT_ENV}: wishes need --admin-api-key")
        if not self._is_alone:
            raise ConfigError(f"{PORT_ENV}: with several ranks each would need every wish in one order")
        calls = AdminCalls(
            api_key=api_key,
            intents=IntentApi(self.calls.ask, self._wished_key),
            explanations=None if self.explainer is None else self.explainer.recent,
        )
        self.admin = AdminServer(port, calls)

    def _wished_key(self, tokens: list[int], extra_key: str | None, cache_salt: str | None) -> RadixKey:
        """A prompt's key as a request's with these fields would be."""
        return RadixKey.first(tokens, len(tokens), self._space(extra_key, cache_salt or None, self.is_eagle))

    def release_host_resources(self) -> None:
        """Stop listening and the transfer threads, and close storage. May be called again."""
        if self.admin is not None:
            self.admin.close()
            self.admin = None
        super().release_host_resources()

    def reset(self) -> None:
        """Empty device and host. Storage keeps what it has; of other weights than these nothing is found."""
        super().reset()
        label = self._weights.changed()
        if label is not None:
            self._name_pages(label)

    def weights_put_in(self) -> None:
        """SGLang has put in weights. Where it has not flushed, what is cached, and what requests go on with,
        is of several weights: storage has it under names that nobody finds later, until a flush."""
        label = self._weights.unnamed()
        if label is not None:
            logger.warning("hiradix: weights were put in without a flush: until one, pages are stored apart")
            self._name_pages(label)

    def _name_pages(self, label: str) -> None:
        """Have pages in storage told from those of other weights by `label`."""
        name, factory = self._attached.name, self._attached.factory
        if not isinstance(factory, NamedStorage):
            raise Misuse(f"{factory} names no pages")
        factory.label = label
        if name is None:
            return
        logger.info("hiradix: weights have changed: storage %s is opened anew, for pages of these", name)
        self._to_reopen = name
        try:
            self._reopen(DETACH_TIMEOUT_S)
        except CacheError as error:
            logger.warning("hiradix: storage %s is not used until its call under way ends: %s", name, error)

    def _reopen(self, timeout_s: float) -> None:
        """Open the storage anew, on all ranks. Raises CacheError, to be called again, while a call of it
        runs; it is not used meanwhile."""
        storage = self._attached.release(timeout_s)
        name, self._to_reopen = self._to_reopen, None
        if name is None:
            raise Misuse("no storage is to be opened anew")
        if storage is not None:
            storage.close()
        try:
            self._attached.attach(name, self._extra)
        except (CacheError, OSError) as error:
            logger.warning("hiradix: storage %s stays detached after a change of weights: %s", name, error)
        self.show_storage()

    # -- every scheduler step -----------------------------------------------------------

    def check_hicache_events(self) -> None:
        """Apply finished transfers; with several ranks, those that all of them have."""
        self._was_asked = False
        self.calls.serve(self.inner.cache.intents)
        if self._has_unclaimed_load:  # its request was not admitted after all
            self.ready_to_load_host_cache()
        self.inner.cache.tick()
        if self._to_reopen is not None:
            with suppress(CacheError):
                self._reopen(0.0)
        if self._meters.is_on:
            self._meters.update()
        if self._checks:
            self.inner.check()

    def ready_to_load_host_cache(self) -> int:
        """Start the load backs of this step; what the next forward waits for, -1 for nothing."""
        self._has_unclaimed_load = False
        return self.inner.ready_to_load_host_cache()

    def _go_on_without_steps(self) -> None:
        """Start and apply transfers where SGLang asks whether they have ended, and takes no step between.

        While generation is paused it only asks, again and again: none would end, and a flush be refused for
        as long. Several ranks need not ask equally often, so theirs wait for the next step, as HiCache's do.
        """
        if self._was_asked and self._is_alone:
            self.ready_to_load_host_cache()
            self.inner.cache.tick()
        self._was_asked = True

    @property
    def ongoing_write_through(self) -> Sized:
        self._go_on_without_steps()  # it is the first of the four that SGLang looks at
        return self.inner.ongoing_write_through

    @property
    def ongoing_load_back(self) -> Sized:
        return self.inner.ongoing_load_back

    @property
    def ongoing_prefetch(self) -> Sized:
        return self.inner.ongoing_prefetch

    @property
    def ongoing_backup(self) -> Sized:
        return self.inner.ongoing_backup

    # -- load back ----------------------------------------------------------------------

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Node]:
        """Bring a request's host hit to the device: (its tokens, its node), or (0, the device prefix).

        All of what was promised or nothing. SGLang does not pin the host's part, so it is looked up again.
        """
        req, node = params.req, params.best_match_node
        match = self.inner.cache.match_again(node)
        quota = None if params.mem_quota is None else params.mem_quota // self.page_size
        is_whole = match.loadable_node.end == node.end
        if not is_whole or self.inner.cache.load_back(match, quota) is None:
            if self.explainer is not None:
                self.explainer.refused(req, node.end * self.page_size, self.inner.cache.load_refusal)
            return 0, req.last_node
        self._has_unclaimed_load = True
        if self._states is not None:
            self._states.start(req, self.inner.record(match.loadable_node))
        return match.loadable_node.end * self.page_size - req.prefix_len, match.loadable_node

    # -- prefetch -----------------------------------------------------------------------

    @property
    def enable_storage(self) -> bool:
        return self.inner.enable_storage

    def is_root(self, node: Node) -> bool:
        return node is self.root_node

    def is_backuped(self, node: Node) -> bool:
        """Whether what follows `node` may be prefetched: always, as it need not be on the host itself."""
        return True

    def get_last_hash_value(self, node: Node) -> str | None:
        """None: pages are hashed by the transfer workers."""
        return None

    def get_prefix_hash_values(self, node: Node) -> list[str]:
        return []

    def prefetch_from_storage(
        self,
        handle: Any,
        last_host_node: Node,
        new_input_tokens: Sequence[int],
        last_hash: str | None = None,
        prefix_keys: Sequence[str] | None = None,
        *,
        matched_prefix_tokens: Sequence[int] = (),
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> bool:
        """Ask storage for what follows `last_host_node`. False: not asked."""
        if not self.enable_storage or not len(new_input_tokens):
            return False
        tokens = np.concatenate([as_tokens(matched_prefix_tokens), as_tokens(new_input_tokens)])
        key = RadixKey.first(tokens, len(tokens), self._space(extra_key, cache_salt or None, self.is_eagle))
        key = key.page_aligned(self.page_size)
        return not self.inner.cache.is_forgetting(key) and self._prefetcher.start(handle, key, last_host_node)

    def check_prefetch_progress(self, handle: Any) -> bool:
        """True when the request may be scheduled."""
        return self.inner.check_prefetch_progress(handle)

    def pop_prefetch_loaded_tokens(self, handle: Any) -> int:
        return self.inner.pop_prefetch_loaded_tokens(handle)

    def pop_prefetch_loaded_span(self, handle: Any) -> tuple[int, int | None]:
        """Tokens its prefetch brought from storage, and where in the prompt they begin."""
        first, num_pages = self._prefetcher.pop_loaded_span(handle)
        return num_pages * self.page_size, first * self.page_size if num_pages else None

    def terminate_prefetch(self, handle: Any) -> None:
        self.inner.terminate_prefetch(handle)

    def release_aborted_request(self, handle: Any) -> None:
        """Forget a request that waits no more. Never blocks."""
        self.inner.release_aborted_request(handle)

    def checkpoint(self, req: Any, *, up_to: int, **more: Any) -> None:
        """Insert as without lower tiers, and stop the request's prefetch: a running request needs nothing
        held on the host."""
        handle = _handle(req)
        if self.explainer is not None:
            self.explainer.explain(req, handle, self._prompt_key)
        self._prefetcher.stop(handle)
        super().checkpoint(req, up_to=up_to, **more)

    def _prompt_key(self, req: Any) -> RadixKey:
        """The key of what SGLang looks up of its prompt: not the last token, which is always computed, nor
        tokens whose log probabilities are asked for."""
        space = self._space(req.extra_key, req.cache_salt or None, self.is_eagle)
        num_tokens = len(req.origin_input_ids) - 1
        if getattr(req, "return_logprob", False) and req.logprob_start_len >= 0:
            num_tokens = min(num_tokens, req.logprob_start_len)
        return RadixKey.first(req.origin_input_ids, max(0, num_tokens), space)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        self._prefetcher.abort(_handle(req))
        super().on_release(req, checkpointed=checkpointed)

    # -- storage, while serving ---------------------------------------------------------

    def attach_storage_backend(
        self,
        storage_backend: str,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> tuple[bool, str]:
        """Attach what `attach_rules` permits; (ok, message) in SGLang's words.

        It is what SGLang's HTTP endpoint calls, and its message the answer: it has nothing of files or
        servers.
        """
        policies = hicache_storage_prefetch_policy, hicache_write_policy
        self._renew_attach_rules()
        name = self.attach_rules.backend_of(storage_backend)
        answer = self._attached.plan(name, *policies)
        if answer is None:
            answer = self._attach_permitted(storage_backend, storage_backend_extra_config_json, policies)
        self.show_storage()
        return answer

    def _renew_attach_rules(self) -> None:
        """Read the rules again: their file may name stores prepared since. Bad ones change nothing."""
        try:
            self.attach_rules = self.read_attach_rules()
        except ConfigError as error:
            audit_log.warning("rules of attach are as before: %s", error)

    def _attach_permitted(
        self, name: str, text: str | None, policies: tuple[str | None, str | None]
    ) -> tuple[bool, str]:
        """Attach on all ranks or none: one that may not, or cannot, tells the others."""
        wanted, opened, failure = None, None, ""
        try:
            wanted = self.attach_rules.wanted(name, text)
            opened = self._attached.open(wanted.backend, wanted.text)
        except AttachRefused as refused:
            failure = str(refused)
            audit_log.warning("attach of storage refused: %s", in_log(failure, None))
        except Exception as error:  # whatever it is, SGLang would answer its text
            failure = over_http(str(error))
            audit_log.warning("attach of storage %s failed: %s", name, in_log(str(error), text))
        if opened is None or wanted is None:
            self._attached.attach_opened(None)
            return False, failure
        done, message = self._attached.attach_opened(opened, *policies)
        if done:
            self._extra = parse_extra_config(wanted.text)
            audit_log.warning("attach of storage %s: done", wanted.backend)
            return done, message
        audit_log.warning("attach of storage %s failed: %s", wanted.backend, in_log(message, wanted.text))
        return done, over_http(message)

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Detach and close the backend; idempotent."""
        self._to_reopen = None
        answer = self.inner.detach_storage_backend()
        audit_log.warning("detach of storage: %s", "done" if answer[0] else in_log(answer[1], None))
        self.show_storage()
        return answer

    def clear_storage_backend(self) -> bool:
        """Delete this model's pages from storage. False when there is none or it failed."""
        done = self.inner.clear_storage_backend()
        audit_log.warning("clear of storage: %s", "done" if done else "failed")
        return done

    def storage_name(self) -> str | None:
        return self._attached.name

    def show_storage(self) -> None:
        """Have SGLang's reports and metrics name the storage that is attached."""
        self.cache_controller.show_storage(self._attached.name, self._attached.storage)
        self._meters.show_storage(self._attached.name)


def _handle(req: Any) -> Any:
    """The id by which SGLang asks for a request's prefetch."""
    return getattr(req, "cache_request_handle", req.rid)
