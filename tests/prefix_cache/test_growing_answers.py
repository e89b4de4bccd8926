"""A key seen before is answered as a new one is, and no answer is written again."""

from __future__ import annotations

import random

import pytest
import torch

from hiradix.memory import ReqToTokenPool, SlotAllocator
from hiradix.prefix_cache import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixCache,
    RadixKey,
)
from hiradix.tree import TokenLog
from tests.seeds import is_enough, seeded, seeds

NUM_TOKENS = 512


def cache_of(page_size: int) -> RadixCache:
    slots = SlotAllocator(NUM_TOKENS, page_size)
    return RadixCache(CacheInitParams(False, ReqToTokenPool(1, 8), slots, page_size))


def match(cache: RadixCache, key: RadixKey) -> torch.Tensor:
    return cache.match_prefix(MatchPrefixParams(key)).device_indices


def store(cache: RadixCache, key: RadixKey) -> bool:
    """Insert `key` whole; False without room."""
    size, found = cache.page_size, match(cache, key)
    new = cache.token_to_kv_pool_allocator.alloc(len(key) // size * size - len(found))
    if new is None:
        return False
    cache.insert(InsertParams(key, torch.cat([found, new])))
    return True


def live(seed: int) -> tuple[int, int]:
    """A random life of two caches that share logs; answers that began where the last did, and others."""
    rng = random.Random(seed)
    sizes = rng.choice([(1, 1), (4, 4), (4, 2), (1, 4)])
    caches = [cache_of(size) for size in sizes]
    logs = [TokenLog([rng.randint(0, 1)]) for _ in range(3)]
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    starts: dict[tuple[int, int], int] = {}
    shared = fresh = 0
    for _ in range(80):
        which, at = int(rng.random() < 0.2), rng.randrange(len(logs))
        cache, log, move = caches[which], logs[at], rng.random()
        if move < 0.4:
            log.extend([rng.randint(0, 1) for _ in range(rng.randint(1, 20))])
        elif move < 0.8:
            store(cache, log.key(rng.randint(1, len(log))))
        else:
            cache.evict(EvictParams(rng.randint(1, 60)))
        asked = rng.randint(1, len(log))
        found = match(cache, log.key(asked))
        wanted = match(cache, RadixKey(log.key(asked).tokens.copy()))
        assert torch.equal(found, wanted), f"seed {seed}: {found} of a known key, {wanted} of a new one"
        if len(found):
            shared += starts.get((which, at)) == found.data_ptr()
            fresh += starts.get((which, at)) != found.data_ptr()
            starts[which, at] = found.data_ptr()
        given.append((found, found.clone()))
        for view, then in given[-30:]:
            assert torch.equal(view, then), f"seed {seed}: an answer changed after it was given"
    return shared, fresh


@seeded
@pytest.mark.parametrize("chunk", range(4))
def test_known_keys_have_the_answers_of_new_ones_and_keep_them(chunk: int) -> None:
    shared, fresh = (sum(numbers) for numbers in zip(*(live(seed) for seed in seeds(20, chunk, 4))))
    some = shared > 150 and fresh > 150
    assert is_enough(some), f"{shared} answers continued the one before, {fresh} did not"


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_growing_conversation_is_answered_from_the_same_memory(page_size: int) -> None:
    cache, log = cache_of(page_size), TokenLog(range(100))
    answers = []  # kept: memory that was given back is somebody else's next
    for turn in range(8):
        assert store(cache, log.key())
        answers.append(match(cache, log.key()))
        log.extend(range(1000 * turn, 1000 * turn + 20))
    starts = [answer.data_ptr() for answer in answers]
    assert len(set(starts[1:])) <= 4, "slots are written anew at each turn"
    fresh = match(cache, RadixKey(log.key().tokens.copy()))
    assert fresh.data_ptr() not in starts, "somebody else's key shares the memory"
    other = cache_of(page_size)
    store(other, log.key())
    foreign = match(other, log.key())
    assert foreign.data_ptr() not in starts, "another cache's answer is used"
