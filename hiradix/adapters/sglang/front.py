"""The parts that SGLang's contracts have in common: attributes, keys, and queries of our cache."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

from hiradix.adapters.sglang.lora_adapters import LoraAdapters
from hiradix.errors import BadNamespace
from hiradix.prefix_cache import PrefixCache, RadixKey
from hiradix.prefix_cache.cache import BESIDE
from hiradix.tree import DEVICE, Node
from hiradix.tree.key import Namespace, namespace, private

logger = logging.getLogger(__name__)


class Front(BasePrefixCache):  # type: ignore[misc]
    """A prefix cache of SGLang's in front of one of ours. Every method runs on SGLang's scheduler thread.

    params: SGLang's CacheInitParams. inner: the cache over the same pools, which does the work. adapters:
    those that SGLang names by where they lie.
    """

    disable = False

    def __init__(self, params: Any, inner: PrefixCache, adapters: LoraAdapters):
        self.inner = inner
        self.adapters = adapters
        self.num_not_text = 0  # times that a request's namespace was no text
        self._tree = inner.tree
        self.page_size = params.page_size
        self.is_eagle = params.is_eagle
        self._has_windows = inner.supports_swa()
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.device = torch.device(params.token_to_kv_pool_allocator.device)

    @property
    def root_node(self) -> Node:
        return self.inner.root_node

    def _key(self, key: Any) -> RadixKey:
        """SGLang's key as ours; its tokens are looked at, not copied."""
        tokens, salt = key.token_ids, getattr(key, "cache_salt", None)  # in 0.5.15 a part of the extra key
        space = self._space(key.extra_key, salt, key.is_bigram or self.is_eagle)
        return RadixKey.first(tokens, len(tokens) if key.limit is None else key.limit, space)

    def _space(self, extra_key: Any, salt: Any, is_bigram: bool) -> Namespace:
        """The namespace of a request. One whose key or salt is no text gets one that no text names."""
        try:
            return namespace(self.named(extra_key), salt, is_bigram)
        except BadNamespace as error:
            if not self.num_not_text:
                logger.warning("hiradix: a request's %s: it shares pages with its equals only", error)
            self.num_not_text += 1
            return namespace(private(self.named(extra_key)), private(salt), is_bigram)

    def named(self, extra_key: Any) -> Any:
        """The extra key with the weights of the adapter that it ends in."""
        return self.adapters.named(extra_key) if isinstance(extra_key, str) else extra_key

    def reset(self) -> None:
        """Empty device and host. Storage keeps what it has."""
        self.inner.reset()

    # -- sizes and texts ----------------------------------------------------------------

    def evictable_size(self) -> int:
        return self.inner.full_evictable_size()

    def full_evictable_size(self) -> int:
        return self.inner.full_evictable_size()

    def swa_evictable_size(self) -> int:
        return self.inner.swa_evictable_size()

    def protected_size(self) -> int:
        return self.inner.full_protected_size()

    def full_protected_size(self) -> int:
        return self.inner.full_protected_size()

    def swa_protected_size(self) -> int:
        return self.inner.swa_protected_size()

    def total_size(self) -> Any:
        return self.inner.total_size()

    def supports_swa(self) -> bool:
        return self._has_windows

    def supports_mamba(self) -> bool:
        return self.inner.supports_mamba()

    def mamba_evictable_size(self) -> int:
        return self.inner.mamba_evictable_size()

    def mamba_protected_size(self) -> int:
        return self.inner.mamba_protected_size()

    def all_mamba_values_flatten(self) -> torch.Tensor:
        """int64 [records]: every device record of state in the tree. O(tree); for leak hunts."""
        return torch.from_numpy(self._tree.all_pages(DEVICE, BESIDE)).to(self.device, torch.int64)

    def all_values_flatten(self) -> torch.Tensor:
        return self.inner.all_values_flatten()

    def available_and_evictable_str(self) -> str:
        return self.inner.available_and_evictable_str()

    def pretty_print(self) -> None:
        self.inner.pretty_print()

    def sanity_check(self) -> None:
        self.inner.check()
