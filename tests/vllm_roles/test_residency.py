"""What is beside vLLM's scheduler: how much of a prompt is there."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from hiradix.adapters.vllm.residency import DevicePrefixes, IdleBlocks, QueuePrices
from hiradix.cache.pages import CacheCounters
from hiradix.policy.no_regret import NoRegret
from hiradix.policy.prices import Prices

PAGE = 4


@dataclass
class Asked:
    block_hashes: list[bytes]
    num_tokens: int
    request_id: str = "r"
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False


@dataclass
class Device:
    """The first `there` blocks are cached. asked: how often one was looked up."""

    there: int = 0
    asked: int = 0
    names: dict[bytes, int] = field(default_factory=dict)

    def has(self, name: bytes) -> bool:
        self.asked += 1
        return self.names[name] < self.there


def test_a_prefix_on_the_device_is_found_in_few_looks() -> None:
    rng = random.Random(1)
    hashes = [b"%d" % at for at in range(1000)]
    device = Device(names={name: at for at, name in enumerate(hashes)})
    prefixes = DevicePrefixes(PAGE, device.has, lambda names: names)
    asked, last = Asked(hashes, 1000 * PAGE), 0
    for _ in range(300):
        device.there, device.asked = rng.choice([device.there, rng.randrange(1001)]), 0
        same = device.there == last
        found = prefixes.find(asked, last)
        assert found == min(device.there, 999)  # the last token is computed
        assert device.asked <= (2 if same else 13)
        last = found


def test_prices_go_by_where_a_prompt_is() -> None:
    gate = NoRegret(page_size=PAGE)
    gate.computed(1, 0.4)
    prices = Prices(gate, PAGE)
    hashes = [b"%d" % at for at in range(10)]
    device = Device(3, names={name: at for at, name in enumerate(hashes)})
    queue_prices = QueuePrices(
        prices, DevicePrefixes(PAGE, device.has, lambda names: names), None, lambda: 0.0
    )
    asked = Asked(hashes, 40)
    assert queue_prices.price_s(asked) == pytest.approx(prices.first_token_s(28))
    asked.num_computed_tokens = 36  # a prefill under way
    assert queue_prices.price_s(asked) == pytest.approx(prices.first_token_s(4))
    asked.num_computed_tokens, asked.skip_reading_prefix_cache = 0, True
    assert queue_prices.price_s(asked) == pytest.approx(prices.first_token_s(40))


def test_sessions_whose_blocks_are_known_are_bounded_whatever_their_prompts() -> None:
    """Found: one without a whole block was kept for ever by policies that let nobody leave."""
    idle = IdleBlocks(SimpleNamespace(num_gpu_blocks=10, free_block_queue=None, get_cached_block=None), 0)
    idle.ended("s", [b"0", b"1"])
    for number in range(1000):
        idle.ended(f"short {number}", [])
        idle.ended(f"long {number}", [b"%d" % number] * 3)
    assert len(idle._names) <= 3 and len(idle._num_users) <= 3
    idle.ended("long 999", [])
    assert "long 999" not in idle._names


@dataclass
class Host:
    """A scheduler role whose host has so many pages of every prompt. looks: how often it was asked."""

    pages: int = 0
    coming: int = 0
    looks: int = 0

    def role(self) -> Any:
        def find(key: int) -> SimpleNamespace:
            self.looks += 1
            return SimpleNamespace(num_pages=min(key, self.pages))

        self.counters = CacheCounters()
        self.tracked = SimpleNamespace(key=lambda num_pages, size: num_pages)
        index = SimpleNamespace(is_open=True, page_size=PAGE, counters=self.counters, find=find)
        prefetcher = SimpleNamespace(
            fetching_pages=lambda rid: self.coming, is_done=lambda rid: not self.coming
        )
        return SimpleNamespace(
            requests={"r": self.tracked}, index=index, has_storage=True, prefetcher=prefetcher
        )


def test_the_host_is_asked_once_a_second_and_when_a_fetch_has_ended() -> None:
    gate, host, now_s = NoRegret(page_size=PAGE), Host(pages=2), [0.0]
    gate.computed(1, 10.0)
    prices, asked = Prices(gate, PAGE), Asked([], 40)
    queue_prices = QueuePrices(prices, None, host.role(), lambda: now_s[0])
    assert queue_prices.price_s(asked) == pytest.approx(prices.first_token_s(32, 8))
    host.coming = 3  # storage has answered
    assert queue_prices.price_s(asked) == pytest.approx(prices.first_token_s(20, 8, 12))
    host.pages, host.coming = 5, 0  # all of it has come
    assert queue_prices.price_s(asked) == pytest.approx(prices.first_token_s(20, 20))
    assert host.looks == 2
    host.pages = 9
    host.counters.written += 1
    assert queue_prices.price_s(asked) == pytest.approx(prices.first_token_s(20, 20)) and host.looks == 2
    now_s[0] += 1.0
    assert queue_prices.price_s(asked) == pytest.approx(prices.first_token_s(4, 36)) and host.looks == 3
    now_s[0] += 5.0  # nothing has come or gone
    queue_prices.price_s(asked)
    assert host.looks == 3
    queue_prices.forget("r")
    queue_prices.price_s(asked)
    assert host.looks == 4
