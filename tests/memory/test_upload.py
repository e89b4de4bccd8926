"""Page ids go to a device without the scheduler's thread waiting for what runs there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hiradix.memory import SlotAllocator
from hiradix.memory.upload import upload
from hiradix.prefix_cache.allocator_ports import AllocatorPort
from hiradix.prefix_cache.slots import SlotTable, slots_of
from hiradix.tree import ids

CUDA = torch.device("cuda", 3)
PAGES = np.array([3, 1, 2], np.int32)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What is done to bring tensors to a device; they stay where they are."""
    made: list[tuple[object, ...]] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        made.append(("pin", len(tensor)))
        return tensor

    def to(tensor: torch.Tensor, device: object, **options: Any) -> torch.Tensor:
        made.append(("to", str(device), options))
        return tensor

    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda *args, device=None, **options: arange(*args, **options))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return made


def freed(device: torch.device) -> torch.Tensor:
    """What SGLang's allocator is given."""
    given: list[torch.Tensor] = []
    theirs = SimpleNamespace(device=device, size=64, free_page_ids=given.append)
    AllocatorPort(theirs, 4).free_pages(PAGES)
    return given[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda device: upload(torch.arange(5), device),
        lambda device: slots_of(PAGES, 4, device),
        lambda device: slots_of(np.arange(3000, dtype=np.int32), 4, device),
        lambda device: SlotTable(8, 4, device).of(PAGES),
        lambda device: SlotAllocator(64, 4, device).alloc(8),
        freed,
    ],
    ids=["upload", "slots_of", "many slots", "Slots", "SlotAllocator", "SGLang's allocator"],
)
@pytest.mark.parametrize("built", [False, True])
def test_nobody_waits(
    make: Callable[[torch.device], torch.Tensor],
    built: bool,
    calls: list[tuple[object, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found: memory that is not pinned makes a copy wait, for all of the stream; SGLang's scheduler has a
    barrier there, behind which it would have waited for a forward pass."""
    monkeypatch.setattr(ids, "IS_BUILT", built)
    want = make(torch.device("cpu"))
    calls.clear()
    seen = make(CUDA)
    assert torch.equal(seen, want)
    assert calls == [("pin", len(want)), ("to", "cuda:3", {"non_blocking": True})]
