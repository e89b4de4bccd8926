"""Device memory of the local engine, one pool a component: what is computed goes in as numbers, and is looked at
before it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hiradix.adapters.vllm.layout import states_of
from hiradix.memory import DevicePool, HostPool, KVShape
from tests.vllm_roles.mini_vllm import DIM, HEADS, LAYERS, STATE, S, World

MARK = 10_000_000  # what a component's numbers differ by from those of the one before


def state_bytes(value: int) -> bytes:
    """A layer's recurrent state, in which every number tells which it is."""
    ints = np.array([value, -value], np.int32)
    return ints.tobytes() + np.array([value, -value, value + 0.5], np.float64).tobytes()


class TokenMemory:
    """Keys and values of a component of attention, S tokens a page. behind: a token looks at so many positions
    before it; None: at all."""

    def __init__(self, world: World, component: int, behind: int | None) -> None:
        shape = KVShape(LAYERS, HEADS, DIM, DIM, torch.float64)
        self.behind = behind
        self.device = DevicePool(shape, world.num_blocks, S)
        self.host = HostPool(shape, world.host_pages, S)
        self._mark = component * MARK
        self._cells = [
            (self.device.k_buffer[n].numpy().reshape(-1), self.device.v_buffer[n].numpy().reshape(-1))
            for n in range(LAYERS)
        ]

    def poison(self, page: int) -> None:
        rows = slice(page * S, (page + 1) * S)
        for k, v in self._cells:
            k[rows] = v[rows] = -0.5

    def write(self, page: int, offset: int, number: int) -> None:
        for layer, (k, v) in enumerate(self._cells):
            value = number + self._mark + layer
            k[page * S + offset], v[page * S + offset] = value, -value

    def check(self, page: int, offset: int, number: int, whose: object) -> None:
        """Assert that what a layer is about to read is what was computed for exactly this position."""
        row = page * S + offset
        for layer, (k, v) in enumerate(self._cells):
            value = number + self._mark + layer
            assert k[row] == value == -v[row], f"read of what is not theirs: {whose}, {k[row]}, {v[row]}"


class StateMemory:
    """Recurrent states of a component, a record for each prefix that has one."""

    def __init__(self, world: World, component: int) -> None:
        raw = [
            torch.zeros((world.num_blocks + 1, 1, 1, STATE.num_bytes), dtype=torch.uint8)
            for _ in range(LAYERS)
        ]
        self.device = states_of(STATE, world.num_blocks + 1, raw)
        self.host = HostPool(self.device.shape, world.host_pages, 1)
        self._mark = component * MARK
        self._rows: list[Any] = [one.numpy()[:, 0, 0] for one in raw]

    def poison(self, slot: int) -> None:
        for rows in self._rows:
            rows[slot] = 0xFF

    def write(self, slot: int, number: int) -> None:
        for layer, rows in enumerate(self._rows):
            rows[slot] = np.frombuffer(state_bytes(number + self._mark + layer), np.uint8)

    def check(self, slot: int, number: int, whose: object) -> None:
        """Assert that the record is the state behind exactly this position."""
        for layer, rows in enumerate(self._rows):
            found = rows[slot].tobytes()
            assert found == state_bytes(number + self._mark + layer), f"a state that is not theirs: {whose}"
