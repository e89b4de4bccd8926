"""How a reset of vLLM's own prefix cache is seen."""

from __future__ import annotations

import pytest

from hiradix.adapters.vllm.resets import ResetWatch
from hiradix.errors import ConfigError


class Pool:
    """What vLLM's block pool has of it: `tests/vllm/test_storage.py` has vLLM's own."""

    def __init__(self) -> None:
        self.cached_block_hash_to_block: dict[str, int] = {}


def test_each_reset_is_seen_once() -> None:
    watch, pool = ResetWatch(), Pool()
    assert not watch.has_seen_one()
    watch.bind(pool)
    assert not watch.has_seen_one()
    pool.cached_block_hash_to_block["hash"] = 1
    assert not watch.has_seen_one(), "a block that is cached or evicted is no reset"
    for _ in range(2):
        pool.cached_block_hash_to_block = {}
        assert watch.has_seen_one()
        assert not watch.has_seen_one()


def test_a_pool_in_which_resets_cannot_be_seen_is_refused_by_version() -> None:
    with pytest.raises(ConfigError, match="cached_block_hash_to_block.*Tested with vLLM"):
        ResetWatch().bind(object())
