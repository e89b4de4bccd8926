"""The calls of 0.5.9's SWARadixCache, for its own class and ours: full slots, window slots beside them."""

from __future__ import annotations

from typing import Any

import torch

from tests.differential.sides import Request, RequestTable, Side


class WindowSide(Side):
    """See the module's docstring. In a page's tier string, D: its full data is there; W: its window's.

    kv, window_kv: by full and by window slot.
    """

    page_size: int
    window: int  # tokens
    window_kv: torch.Tensor

    def use_pools(self, setup: dict[str, Any], pool: Any, allocator: Any, **options: Any) -> None:
        """Have pools of SGLang's. pool, allocator: its classes; options: of the version's pool alone."""
        self.page_size, self.window = setup["page_size"], setup["window"]
        num_full, num_window = (setup[name] * self.page_size for name in ("num_pages", "num_window_pages"))
        made = pool(
            size=num_full, size_swa=num_window, page_size=self.page_size, dtype=torch.int64, head_num=1,
            head_dim=1, swa_attention_layer_ids=[1], full_attention_layer_ids=[0], device="cpu", **options,
        )  # fmt: skip
        self.allocator = allocator(num_full, num_window, self.page_size, torch.int64, "cpu", made, False)
        self.kv = made.full_kv_pool.k_buffer[0].view(-1)
        self.window_kv = made.swa_kv_pool.k_buffer[0].view(-1)
        self.rows = RequestTable()

    # -- slots ----------------------------------------------------------------------------

    def beside(self, slots: torch.Tensor) -> torch.Tensor:
        """The window slots beside full slots, 0 for none."""
        found: torch.Tensor = self.allocator.full_to_swa_index_mapping[slots]
        return found

    def write(self, slots: torch.Tensor, values: list[int]) -> None:
        super().write(slots, values)
        self.window_kv[self.beside(slots)] = torch.tensor(values, dtype=torch.int64)

    def holds(self, slots: torch.Tensor, values: list[int]) -> bool:
        """All of the full data, and the window behind the end."""
        window = self.beside(slots[-self.window :])
        seen = self.window_kv[window].tolist() if bool((window > 0).all()) else []
        return super().holds(slots, values) and seen == values[-self.window :]

    def free_tokens(self) -> list[int]:
        return [self.allocator.full_available_size(), self.allocator.swa_available_size()]

    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """By the two pools: in pages, the peer's own call needs a GPU."""
        if num_tokens > min(self.free_tokens()):
            return None
        slots: torch.Tensor = self.allocator.full_attn_allocator.alloc(num_tokens)
        window = self.allocator.swa_attn_allocator.alloc(num_tokens)
        self.allocator.full_to_swa_index_mapping[slots] = window
        return slots

    def make_room(self, num_tokens: int) -> None:
        full, window = (max(0, num_tokens - free) for free in self.free_tokens())
        if full or window:
            self.evict(full, window)

    def shares(self, request: Request) -> bool:
        """With a new page only: theirs takes its lock anew, and less of it where nodes were split since."""
        return len(request.fill_ids) // self.page_size * self.page_size > request.cache_protected_len

    # -- the calls ------------------------------------------------------------------------

    def _evictable(self) -> list[int]:
        return [self.cache.full_evictable_size(), self.cache.swa_evictable_size()]

    def lock(self, node: Any) -> tuple[Any, Any]:
        before = self._evictable()
        receipt = node, self.cache.inc_lock_ref(node)
        return receipt, [now - was for now, was in zip(self._evictable(), before)]

    def unlock(self, receipt: Any) -> Any:
        before = self._evictable()
        self.cache.dec_lock_ref(*receipt)
        return [now - was for now, was in zip(self._evictable(), before)]

    def insert(self, namespace: str | None, tokens: list[int], slots: torch.Tensor) -> int:
        params = self.records.InsertParams(key=self.key(namespace, tokens), value=slots, prev_prefix_len=0)
        return int(self.cache.insert(params).prefix_len)

    def evict(self, num_tokens: int, num_window_tokens: int = 0) -> Any:
        """Tokens that are free now and were not."""
        before = self.free_tokens()
        self.cache.evict(self.records.EvictParams(num_tokens, num_window_tokens))
        return [now - was for now, was in zip(self.free_tokens(), before)]

    def say(self, num_tokens: int, num_window_tokens: int) -> list[int]:
        """Evict: the tokens that were evicted by the cache's own account."""
        done = self.cache.evict(self.records.EvictParams(num_tokens, num_window_tokens))
        return [done.num_tokens_evicted, done.swa_num_tokens_evicted]

    def share(self, request: Request, chunked: bool) -> None:
        self._unpacked(request)
        super().share(request, chunked)
        request.receipt = request.last_node, request.receipt

    def finish(self, request: Request, is_insert: bool) -> None:
        self._unpacked(request)
        super().finish(request, is_insert)

    def _unpacked(self, request: Request) -> None:
        request.last_node, request.receipt = request.receipt

    def sizes(self) -> list[int]:
        cache = self.cache
        protected = [cache.full_protected_size(), cache.swa_protected_size()]
        return [*self._evictable(), *protected, *cache.total_size()]
