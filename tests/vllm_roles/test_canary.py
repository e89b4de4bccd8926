"""Of vLLM only requests compute: what storage has is compared with what they did before it is served."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.vllm_roles.mini_vllm import FakeLora, FakeRequest, MiniVLLM, S, World
from tests.vllm_roles.test_life import request

WORLDS = {
    "sync": World(compares=True),
    "async": World(compares=True, load_async=True),
    "two workers": World(compares=True, num_workers=2, load_async=True),
    "window": World(compares=True, window=6, load_async=True, num_blocks=32),
}
Store = list[dict[str, bytes]]


@pytest.fixture(params=WORLDS.values(), ids=WORLDS)
def world(request: pytest.FixtureRequest) -> World:
    return request.param


def engine(world: World, store: Store, weights: int = 0) -> MiniVLLM:
    """A process whose model checks every number that it reads."""
    vllm = MiniVLLM(world, store)
    vllm.weights = weights
    return vllm


def served(vllm: MiniVLLM, one: FakeRequest) -> int:
    """Tokens that a request is given from the host or storage."""
    before = vllm.hit_tokens
    vllm.add(one)
    vllm.drain()
    return vllm.hit_tokens - before


def test_the_first_hit_is_computed_once_and_the_next_is_served(world: World) -> None:
    store: Store = [{} for _ in range(world.num_workers)]
    assert served(engine(world, store), request("a", 4)) == 0
    again = engine(world, store)
    assert served(again, request("b", 4)) == 0, "nothing computed yet that could be compared"
    again.role.index.lose_all()
    assert served(again, request("c", 4)) == 4 * S
    assert served(again, request("d", 4, first=9)) == 0


def test_a_model_of_the_same_name_is_served_nothing_of_others(world: World) -> None:
    store: Store = [{} for _ in range(world.num_workers)]
    served(engine(world, store), request("a", 4))
    other = engine(world, store, weights=1)
    for name, hit in (("b", 0), ("c", 4 * S)):
        assert served(other, request(name, 4)) == hit
        other.role.index.lose_all()
    first = engine(world, store)
    assert served(first, request("d", 4)) == 0
    first.role.index.lose_all()
    assert served(first, request("e", 4)) == 4 * S


def test_without_comparing_the_model_reads_what_others_computed() -> None:
    """The positive control: the checks of the model see it."""
    world = replace(WORLDS["sync"], compares=False)
    store: Store = [{}]
    served(engine(world, store), request("a", 4))
    with pytest.raises(AssertionError):
        served(engine(world, store, weights=1), request("b", 4))


def test_each_adapter_is_compared_for_itself() -> None:
    world, store = WORLDS["async"], [{}]
    lora = FakeLora("sql", "hub/sql")
    first = engine(world, store)
    served(first, request("a", 4))
    served(first, request("b", 4, lora_request=lora))
    again = engine(world, store)
    assert served(again, request("c", 4)) == 0
    again.role.index.lose_all()
    assert served(again, request("d", 4)) == 4 * S
    again.weights = 7  # the adapter under that name was trained on: what it computes is other KV
    assert served(again, request("e", 4, lora_request=lora)) == 0
    again.role.index.lose_all()
    assert served(again, request("f", 4, lora_request=lora)) == 4 * S, "its own"


def test_what_waits_while_the_first_is_compared_is_served(world: World) -> None:
    """All are asked for before anything could be compared, and storage had to leave them unserved."""
    store: Store = [{} for _ in range(world.num_workers)]
    first = engine(world, store)
    for number in range(4):
        served(first, request(f"first {number}", 6, first=20 * number))
    again = engine(replace(world, num_blocks=16), store)
    for number in range(4):
        again.add(request(f"again {number}", 6, first=20 * number))
    again.drain()
    assert again.hit_tokens > 5 * S, (
        "more than one of them; of what finds the host full of pages to store, a part"
    )
