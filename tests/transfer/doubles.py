"""Pools, a transport and a storage backend small enough to watch: every page is one number per layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hiradix.tree.hashing import PageRows

NUM_LAYERS = 4


@dataclass(frozen=True)
class Shape:
    num_layers: int = NUM_LAYERS


class Pool:
    """A pool of `num_pages` pages, `num_layers` int64 values each; contiguous per page like page_first."""

    device = "cpu"

    def __init__(self, num_pages: int, num_layers: int = NUM_LAYERS):
        self.shape = Shape(num_layers)
        self.data = np.zeros((num_pages, num_layers), np.int64)
        self.page_bytes = num_layers * 8
        self.gate: Any = None
        self.on_view: Callable[[int], None] = lambda page: None

    def register_layer_transfer_counter(self, counter: Any) -> None:
        self.gate = counter

    def page_views(self, page: int) -> list[memoryview]:
        self.on_view(page)
        return [memoryview(self.data[page]).cast("B")]


class Transport:
    """Copies; `before(src, dst, src_pages, dst_pages, layers)` may raise or watch."""

    def __init__(self) -> None:
        self.before: Callable[..., None] = lambda *args: None
        self.num_calls = 0

    def copy_pages(
        self, src: Any, dst: Any, src_pages: Any, dst_pages: Any, layers: range | None = None
    ) -> None:
        self.num_calls += 1
        self.before(src, dst, src_pages, dst_pages, layers)
        layer_slice = slice(None) if layers is None else slice(layers.start, layers.stop)
        dst.data[dst_pages, layer_slice] = src.data[src_pages, layer_slice]


class MemoryStorage:
    """A dictionary. `before(call, keys)` may raise, block, or return something to answer instead."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.before: Callable[[str, Sequence[str]], Any] = lambda call, keys: NORMAL
        self.calls: list[tuple[str, int]] = []

    def _enter(self, call: str, keys: Sequence[str]) -> Any:
        self.calls.append((call, len(keys)))
        return self.before(call, keys)

    def exists(self, keys: Sequence[str], prefix_keys: Sequence[str] = ()) -> Any:
        answer = self._enter("exists", keys)
        if answer is not NORMAL:
            return answer
        return next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))

    def get(self, keys: Sequence[str], into: Sequence[Sequence[memoryview]]) -> Any:
        answer = self._enter("get", keys)
        if answer is not NORMAL:
            return answer
        done = []
        for key, views in zip(keys, into, strict=True):
            data = self.pages.get(key)
            done.append(data is not None)
            if data is not None:
                views[0][:] = data
        return done

    def put(self, keys: Sequence[str], pages: Sequence[Sequence[memoryview]]) -> Any:
        answer = self._enter("put", keys)
        if answer is not NORMAL:
            return answer
        for key, views in zip(keys, pages, strict=True):
            self.pages[key] = bytes(views[0])
        return [True] * len(keys)


NORMAL = object()


def rows_of(first: int, num_pages: int, prior: bytes = b"") -> PageRows:
    """Pages of one token each: first, first + 1, ..."""
    return PageRows(prior, np.arange(first, first + num_pages, dtype=np.int64).reshape(-1, 1))
