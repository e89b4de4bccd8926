"""KV events of the host tier: what they add up to is what the host has, in the engine's own names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hiradix.adapters.vllm.events import HostEvents, Stored
from hiradix.tree import Tier
from tests.vllm_roles.mini_vllm import FakeRequest, MiniVLLM, S, World
from tests.vllm_roles.test_life import request
from tests.vllm_roles.test_prefetches import PAGES, ROOMY


def names_on_host(vllm: MiniVLLM) -> set[bytes]:
    tree, names = vllm.index.tree, set()
    for node in tree.nodes():
        assert node.resident(Tier.HOST)
        whole = FakeRequest("any", tree.path_key(node).tokens.tolist(), 0).block_hashes
        names.update(whole[node.start : node.end])
    return names


@pytest.mark.parametrize("period", [1, 5])
def test_events_add_up_to_what_the_host_has(period: int) -> None:
    """However seldom they are taken: a page may leave and be another one's in between."""

    def stored(event: Stored) -> Any:
        assert len(event.token_ids) == len(event.hashes) * S
        return event

    vllm = MiniVLLM(World(host_pages=7), events=HostEvents(S, 1, stored, list))
    on_host: set[bytes] = set()
    num_removed = 0
    for number in range(20):
        vllm.add(request(f"r{number}", 1 + number % 4, first=number * 7 % 30))
        vllm.drain()
        for event in vllm.role.take_events() if number % period == period - 1 else ():
            if isinstance(event, Stored):
                assert event.parent is None or event.parent in on_host
                assert on_host.isdisjoint(event.hashes)
                on_host.update(event.hashes)
            else:
                assert on_host.issuperset(event)
                on_host.difference_update(event)
                num_removed += len(event)
    assert on_host == names_on_host(vllm) and num_removed > 10
    vllm.role.reset()
    (removed,) = vllm.role.take_events()
    assert set(removed) == on_host


def test_pages_that_are_fetched_a_second_time_are_told_again() -> None:
    """As those of a request that has let go of them for one before it."""
    store: list[dict[str, bytes]] = [{}]
    world = replace(ROOMY, host_pages=3 * PAGES, max_running=1)
    first = MiniVLLM(world, store)
    for name, at in (("a", 1), ("b", 500)):
        first.add(request(name, PAGES, max_tokens=1, first=at))
    first.drain()
    vllm = MiniVLLM(world, store, events=HostEvents(S, 1, lambda event: event, list))
    on_host: set[bytes] = set()

    def follow() -> None:
        for _ in range(20):
            vllm.step()
            vllm.ranks[0].driver.run()
            for event in vllm.role.take_events():
                if isinstance(event, Stored):
                    on_host.update(event.hashes)
                else:
                    on_host.difference_update(event)

    long = FakeRequest("long", [7] * 2 * S, 400)
    vllm.add(long)
    vllm.run(lambda: vllm.running == [long])
    later, sooner = request("b", PAGES, max_tokens=1, first=500), request("a", PAGES, max_tokens=1)
    vllm.add(later)
    follow()
    assert vllm.role.gauges["waiting_reserved_pages"] == PAGES and on_host.issuperset(later.block_hashes)
    vllm.add(sooner)
    vllm.role.prefetcher.in_order(["a", "b"])
    follow()
    gauges = {"waiting_reserved_pages": PAGES, "waiting_reserved_pages_cap": 3 * PAGES // 2}
    assert vllm.role.gauges == {**gauges, "requests_waiting_for_host_room": 1}
    vllm.index.supply.evict(Tier.HOST, 3 * PAGES)
    follow()
    assert on_host.issuperset(sooner.block_hashes) and not on_host.issuperset(later.block_hashes)
    vllm.abort(sooner)
    follow()
    assert vllm.role.prefetch_figures.refetched == PAGES and on_host.issuperset(later.block_hashes)
    assert vllm.role.take_stats()["waiting_reserved_pages"] == PAGES
    vllm.drain()
