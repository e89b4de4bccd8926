"""What a read says of its place in the chain, whatever of the chain is known: its batches are one use there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hiradix.storage import Batch
from hiradix.tree import RadixKey
from tests.cache.component_storage import Part
from tests.cache.test_component_storage import TOKENS, restarted, serve_key
from tests.cache.test_lost_hits import fetch, key, serve, stored_world


@pytest.mark.parametrize("num_known", [0, 3])
def test_each_batch_names_the_page_in_front_of_it(num_known: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = stored_world(200, device_pages=220)
    if num_known:
        assert serve(world, key(num_known)) == num_known
    asked: list[Batch] = []
    get = world.storage.get

    def noted(keys: Batch, into: Sequence[Any]) -> list[bool]:
        asked.append(keys)
        return get(keys, into)

    monkeypatch.setattr(world.storage, "get", noted)
    assert fetch(world, key(200)) == 200
    names = list(world.storage.pages)  # in the order of storing, which is that of the chain
    assert len(asked) == 2 and sum(map(len, asked)) == 200 - num_known
    for batch in asked:
        at = names.index(batch[0])
        assert batch.after == (names[at - 1] if at else "")


@pytest.mark.parametrize("num_known", [0, 5])
def test_each_component_names_the_page_in_front_of_it(num_known: int) -> None:
    world = restarted(5, 12)
    if num_known:
        serve_key(world, TOKENS[:num_known])
    asked: list[tuple[Part, Any]] = []
    world.depot.on_get = lambda part, keys: asked.append((part, keys))
    world.fetch_in_peace(RadixKey(TOKENS))
    names = world.hashes(RadixKey(TOKENS))
    assert {part.component for part, _ in asked} == {0, 1}
    for _, batch in asked:
        at = names.index(batch[0])
        assert batch.after == (names[at - 1] if at else "")
