"""Blocks that ended requests left on the device, against a device that remembers what each block holds."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.adapters.vllm.finished_requests import FinishedRequest, WriteBackSaves
from hiradix.adapters.vllm.requests import Tracked, track
from hiradix.cache.foreign_device import NULL_BLOCK
from tests.vllm_roles.mini_vllm import FakeRequest, S

BLOCKS = 12


class Device:
    """What each block holds, and the tables of requests as they left them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.book = WriteBackSaves()
        self.holds = dict.fromkeys(range(1, BLOCKS + 1), 0)
        self.turn = 0
        self.left: list[tuple[Tracked, tuple[int, ...], list[int]]] = []
        self.told: list[Tracked] = []

    def write(self) -> None:
        """A step writes to some blocks: the book names what that takes, before it is gone."""
        blocks = set(self.rng.sample(range(1, BLOCKS + 1), self.rng.randrange(4)))
        named = self.book.taken(blocks)
        for pending in named:
            ((table, held),) = [(t, h) for tracked, t, h in self.left if tracked is pending.tracked]
            there = [block if self.holds[block] == was else NULL_BLOCK for block, was in zip(table, held)]
            assert pending.table == (tuple(there),)
            assert blocks & set(there), "it is told when a block of it is taken"
        self.told += [pending.tracked for pending in named]
        assert len(set(map(id, self.told))) == len(self.told), "once for each request"
        lost = {block for _, table, held in self.left for block in blocks if block in table}
        owners = {self._last(block) for block in lost}
        assert {id(owner) for owner in owners if owner is not None} <= {id(one) for one in self.told}
        for block in blocks:
            self.turn += 1
            self.holds[block] = self.turn

    def _last(self, block: int) -> Tracked | None:
        """Who left a block last, if it still holds what he left in it."""
        for tracked, table, held in reversed(self.left):
            if block in table:
                return tracked if held[table.index(block)] == self.holds[block] else None
        return None

    def leave(self) -> None:
        """A request ends, with blocks of others before it or its own; its last one is half full."""
        count = self.rng.randrange(1, 6)
        table = tuple(self.rng.sample(range(1, BLOCKS + 1), count + 1))
        tracked = track(FakeRequest(f"r{len(self.left)}", [1] * (S * count + 1), 1), S)
        assert tracked is not None
        self.book.leave(FinishedRequest(tracked, count, (table,)))
        self.left.append((tracked, table[:count], [self.holds[block] for block in table[:count]]))

    def forget(self) -> None:
        if self.rng.random() < 0.1:
            self.book.forget_all()
            self.left.clear()


@settings(max_examples=200)
@given(st.integers(0, 1 << 30))
def test_what_is_taken_is_told_once_with_all_of_it_that_is_still_there(seed: int) -> None:
    device = Device(seed)
    for _ in range(60):
        getattr(device, device.rng.choice(["write", "leave", "forget"]))()
