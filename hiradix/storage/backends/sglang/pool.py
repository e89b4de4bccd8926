"""A stand-in for SGLang's host pool: registered memory with one piece per page, for its zero-copy classes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hiradix.errors import Misuse
from hiradix.os_memory import staging_memory
from hiradix.storage.kit.call_threads import gather, scatter
from hiradix.storage.protocol import Page, page_bytes

_ALIGN = 4096


class ArenaPool:
    """`num_slots` pages of at most `slot_bytes`, page-aligned and never moved.

    It answers what SGLang's classes ask a pool of a latent (MLA) model in page_first layout: such pages are
    one piece each, so keys get no `_k` and `_v`. A page's host indices are `page_size` tokens of its slot.
    """

    device = "cpu"
    start_layer, layer_num, target_layer_num, end_layer = 0, 1, 1, 1
    head_num, head_dim = 1, 1
    stores_page_envelope = False

    def __init__(self, num_slots: int, slot_bytes: int, page_size: int, layout: str = "page_first"):
        import torch

        self.layout = layout
        self.page_size = page_size
        self.size = num_slots * page_size
        self.page_num = num_slots
        self.dtype = torch.uint8
        self.store_dtype = torch.uint8
        self._stride = -(-slot_bytes // _ALIGN) * _ALIGN
        self.slot_bytes = slot_bytes
        self._memory = staging_memory(num_slots * self._stride)
        self.kv_buffer = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._lengths = [slot_bytes] * num_slots
        self._free = list(range(num_slots))
        self._changed = threading.Condition()

    # -- ours ---------------------------------------------------------------------------

    @contextmanager
    def lease(self, sizes: Sequence[int]) -> Iterator[list[int]]:
        """Slots for leading pages of these sizes: as many as are free, at least one; waits for that."""
        if not sizes or max(sizes) > self._stride:
            raise Misuse(f"pages of {max(sizes)} bytes, slots of {self._stride}")
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free))
            slots = [self._free.pop() for _ in range(min(len(sizes), len(self._free)))]
            for slot, size in zip(slots, sizes):
                self._lengths[slot] = size
        try:
            yield slots
        finally:
            with self._changed:
                self._free += slots
                self._changed.notify_all()

    def fill(self, slot: int, page: Page) -> None:
        """Copy a page into its slot."""
        gather(page, self._view(slot, page_bytes(page)))

    def empty(self, slot: int, page: Page) -> None:
        """Copy a slot out to a page."""
        scatter(self._view(slot, page_bytes(page)), page)

    def indices(self, slots: Sequence[int]) -> Any:
        """The tokens of these slots, as SGLang numbers them."""
        import torch

        starts = torch.tensor(slots, dtype=torch.int64) * self.page_size
        return (starts[:, None] + torch.arange(self.page_size)[None, :]).reshape(-1)

    def _view(self, slot: int, num_bytes: int) -> memoryview:
        return self._memory[slot * self._stride : slot * self._stride + num_bytes]

    # -- SGLang's -----------------------------------------------------------------------

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Address and length of each page."""
        slots = [int(token) // self.page_size for token in indices[:: self.page_size].tolist()]
        base = self.kv_buffer.data_ptr()
        return [base + slot * self._stride for slot in slots], [self._lengths[slot] for slot in slots]

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        """The page that begins at token `index`."""
        slot = int(index) // self.page_size
        start = slot * self._stride
        return self.kv_buffer[start : start + self._lengths[slot]]

    def get_dummy_flat_data_page(self) -> Any:
        """Memory of a page's length."""
        import torch

        return torch.zeros(self.slot_bytes, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: Any) -> None:
        """Copy a page to where token `index` begins."""
        self.get_data_page(index).copy_(data_page.reshape(-1))

    def get_page_buffer_element_size(self, split_factor: int = 1) -> int:
        """Length of a piece."""
        return self.slot_bytes

    def get_ksize_per_token(self) -> int:
        """Bytes of a token, rounded up: seals make pages no multiple of it."""
        return -(-self.slot_bytes // self.page_size)

    get_size_per_token = get_ksize_per_token
