"""What every drop-in prefix cache class must do for an engine: mixins to inherit, with `make` filled in.

    class TestMine(PrefixCacheContract, HostTierContract):
        def make(self, page_size, foreign, **switches): ...

`make` returns pools, a cache and the moves of a scheduler over them (`tests.prefix_cache.bench_engine.Bench`)
with room for at least 160 tokens; all are closed after the test. Every move of the bench checks that the
slots a request runs on hold exactly the data of its tokens. `PrefixCacheContract` is for all classes,
`HostTierContract` for those with a host tier.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hiradix.errors import BadNamespace, Misuse
from hiradix.prefix_cache import EvictParams, InsertParams, LockReceipt, MatchPrefixParams, RadixKey
from hiradix.tree import Node, Tier
from tests.prefix_cache.bench_engine import Bench, Request, closed_after, prompt
from tests.seeds import is_enough, seeded, seeds

Make = Callable[..., Bench]
EVERYTHING = EvictParams(10_000, 10_000)


def tokens_of(sizes: int | tuple[int, ...]) -> int:
    """Tokens of full attention in what a class calls its size."""
    return sizes if isinstance(sizes, int) else sizes[0]


def started(bench: Bench, tokens: list[int], **options: Any) -> Request:
    req = bench.start(tokens, **options)
    assert req is not None, "the pool has room"
    return req


def served(bench: Bench, tokens: list[int], **options: Any) -> Request:
    """A request from start to end, with nothing left in flight."""
    req = started(bench, tokens, **options)
    bench.finish(req)
    bench.settle()
    return req


def found(bench: Bench, tokens: Any, **namespace: Any) -> Any:
    return bench.cache.match_prefix(MatchPrefixParams(RadixKey(tokens, **namespace)))


def locked(bench: Bench, tokens: list[int]) -> tuple[Node, LockReceipt]:
    """Serve a request, and lock what the cache has of it."""
    served(bench, tokens)
    node = found(bench, tokens).last_device_node
    return node, bench.cache.inc_lock_ref(node)


class _Contract:
    def make(self, page_size: int, foreign: bool, **switches: Any) -> Bench:
        raise NotImplementedError

    @pytest.fixture(params=[False, True], ids=["own-pools", "foreign-pools"])
    def bench(self, request: pytest.FixtureRequest) -> Iterator[Make]:
        """`make` on our own pools and on a stand-in with SGLang's surface."""

        def build(page_size: int = 4, **switches: Any) -> Bench:
            return self.make(page_size, request.param, **switches)

        yield from closed_after(build)


class PrefixCacheContract(_Contract):
    """For all classes."""

    # -- reuse ----------------------------------------------------------------------------

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_a_second_request_reuses_whole_pages_of_the_first(self, bench: Make, page_size: int) -> None:
        b = bench(page_size)
        first = started(b, prompt(70))
        assert first.device_tokens == 0 and first.cache_protected_len == 70 // page_size * page_size
        b.finish(first)
        assert started(b, prompt(70)).device_tokens == 69 // page_size * page_size
        b.check()

    def test_the_last_token_is_always_computed(self, bench: Make) -> None:
        b = bench()
        served(b, prompt(8))
        assert started(b, prompt(8)).device_tokens == 4

    def test_equal_prompts_computed_at_the_same_time_share_slots_afterwards(self, bench: Make) -> None:
        b = bench()
        one, other = started(b, prompt(9)), started(b, prompt(9))
        rows = b.rows.req_to_token
        assert torch.equal(rows[one.req_pool_idx][:8], rows[other.req_pool_idx][:8])
        b.check()
        b.finish(one)
        b.finish(other)
        b.check()

    def test_what_was_generated_is_found_by_the_next_turn(self, bench: Make) -> None:
        b = bench()
        req = started(b, prompt(6))
        for token in range(900, 911):
            assert b.decode(req, token)
        b.finish(req)
        assert started(b, prompt(6) + list(range(900, 911)) + [1]).device_tokens == 16
        b.check()

    def test_an_aborted_request_gives_back_what_is_its_own(self, bench: Make) -> None:
        b = bench()
        req = started(b, prompt(6))
        for token in (100, 101, 102):
            assert b.decode(req, token)
        b.finish(req, insert=False)
        b.settle()
        b.check()
        assert b.cache.full_protected_size() == 0 and tokens_of(b.cache.total_size()) == 4

    @pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
    def test_no_hit_crosses_a_namespace(self, bench: Make, field: str) -> None:
        b = bench()
        served(b, prompt(20), **{field: "a"})
        for other in ({}, {field: "b"}):
            assert served(b, prompt(20), **other).device_tokens == 0
        assert started(b, prompt(20), **{field: "a"}).device_tokens == 16

    def test_a_salt_is_no_extra_key(self, bench: Make) -> None:
        b = bench()
        served(b, prompt(20), extra_key="a")
        assert started(b, prompt(20), cache_salt="a").device_tokens == 0

    def test_requests_that_shared_nothing_before_they_finished(self, bench: Make) -> None:
        b = bench()
        b.finish(started(b, prompt(10), share=False))
        assert started(b, prompt(14)).device_tokens == 8
        b.check()

    @pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
    @pytest.mark.parametrize("value", ["\ud800", "a\udfff", 7, b"x", ("lora", 1)], ids=ascii)
    def test_what_names_no_namespace_is_refused_at_every_door(
        self, bench: Make, field: str, value: Any
    ) -> None:
        """Before anything is served, locked or changed."""
        b = bench()
        served(b, prompt(20))
        req = started(b, prompt(20))
        for token in (100, 101, 102, 103):
            assert b.decode(req, token)
        before = b.cache.stats()
        with pytest.raises(BadNamespace, match=field):
            found(b, prompt(20), **{field: value})
        with pytest.raises(BadNamespace, match=field):
            b.cache.insert(InsertParams(RadixKey(prompt(8), **{field: value}), torch.arange(8)))
        setattr(req, field, value)
        doors = [
            lambda: b.cache.cache_unfinished_req(req),
            lambda: b.cache.cache_finished_req(req),
            lambda: self.prefetched(b, req),
        ]
        for door in doors:
            with pytest.raises(BadNamespace, match=field):
                door()
        assert b.cache.stats() == before
        setattr(req, field, None)
        b.finish(req, insert=False)
        b.settle()
        assert b.cache.full_protected_size() == 0
        b.check()

    def prefetched(self, b: Bench, req: Request) -> None:
        """Ask storage for what follows; a class without storage refuses the name too."""
        b.cache.prefetch_from_storage(req.rid, b.cache.root_node, req.fill_ids[:-1], req=req)

    # -- match ----------------------------------------------------------------------------

    def test_a_match_is_the_same_for_every_form_of_the_tokens(self, bench: Make) -> None:
        b = bench()
        served(b, prompt(17))
        ids = prompt(17)
        forms = [ids, array("q", ids), np.array(ids), np.array(ids, dtype=np.int32), torch.tensor(ids)]
        slots = [found(b, form).device_indices for form in forms]
        assert all(torch.equal(one, slots[0]) for one in slots) and len(slots[0]) == 16
        assert slots[0].dtype == torch.int64 and slots[0].device.type == "cpu"

    def test_less_than_a_page_or_nothing_matches_nothing(self, bench: Make) -> None:
        b = bench()
        served(b, prompt(17))
        for tokens in ([], prompt(3), [5] + prompt(16)):
            match = found(b, tokens)
            assert len(match.device_indices) == 0 and match.host_hit_length == 0
            assert match.last_device_node is match.last_host_node is b.cache.root_node

    def test_a_match_takes_and_frees_nothing(self, bench: Make) -> None:
        b = bench()
        served(b, prompt(40))
        sizes = b.cache.total_size(), b.cache.full_evictable_size(), b.allocator.available_size()
        for n in range(0, 44, 3):
            found(b, prompt(n) + [7, 7, 7])
        assert sizes == (b.cache.total_size(), b.cache.full_evictable_size(), b.allocator.available_size())
        b.check()

    # -- insert, lock, evict --------------------------------------------------------------

    def test_an_insert_says_how_much_was_there(self, bench: Make) -> None:
        b = bench()
        insert = b.cache.insert
        assert insert(InsertParams(RadixKey(prompt(8)), b.allocator.alloc(8))).prefix_len == 0
        shared = found(b, prompt(8)).device_indices
        mine = torch.cat([shared, b.allocator.alloc(4)])
        assert insert(InsertParams(RadixKey(prompt(12)), mine, prev_prefix_len=8)).prefix_len == 8
        assert tokens_of(b.cache.total_size()) == 12
        b.check()

    def test_a_lock_keeps_its_path_until_its_receipt_comes_back(self, bench: Make) -> None:
        b = bench()
        served(b, prompt(24))
        served(b, prompt(12, start=500))
        node = found(b, prompt(24)).last_device_node
        receipt, again = b.cache.inc_lock_ref(node), b.cache.inc_lock_ref(node)
        assert (receipt.delta, again.delta) == (-24, 0)
        assert b.cache.full_protected_size() == 24 and b.cache.full_evictable_size() == 12
        assert b.cache.evict(EVERYTHING).num_tokens_evicted == 12
        assert b.cache.dec_lock_ref(node, again) == 0
        assert b.cache.evict(EVERYTHING).num_tokens_evicted == 0
        assert b.cache.dec_lock_ref(node, receipt) == 24
        assert b.cache.evict(EVERYTHING).num_tokens_evicted == 24
        assert tokens_of(b.cache.total_size()) == 0
        b.check()

    def test_a_split_below_a_lock_keeps_it_whole(self, bench: Make) -> None:
        b = bench()
        node, receipt = locked(b, prompt(24))
        found(b, prompt(8) + [7] * 8)
        assert b.cache.evict(EVERYTHING).num_tokens_evicted == 0 and b.cache.full_protected_size() == 24
        b.cache.dec_lock_ref(node, receipt)
        assert b.cache.full_protected_size() == 0
        b.check()

    def test_eviction_frees_what_is_asked_for_the_coldest_first(self, bench: Make) -> None:
        b = bench()
        for i in range(5):
            served(b, prompt(12, start=100 * i))
        served(b, prompt(12))  # used once more
        before = b.allocator.available_size()
        evicted = b.cache.evict(EvictParams(12)).num_tokens_evicted
        assert 12 <= evicted <= 24 and b.allocator.available_size() >= before + 12 - b.page_size
        assert len(found(b, prompt(12, start=100)).device_indices) == 0
        assert len(found(b, prompt(12)).device_indices) == 12
        b.check()

    def test_evicting_nothing_does_nothing(self, bench: Make) -> None:
        b = bench()
        assert b.cache.evict(EVERYTHING).num_tokens_evicted == 0
        served(b, prompt(12))
        for params in (EvictParams(0), EvictParams(-5)):
            assert b.cache.evict(params).num_tokens_evicted == 0
        assert tokens_of(b.cache.total_size()) == 12

    def test_sizes_add_up_whatever_is_locked(self, bench: Make) -> None:
        b = bench()
        held = []
        for i in range(4):
            served(b, prompt(8 + 4 * i, start=100 * i))
            held.append(b.cache.inc_lock_ref(found(b, prompt(8, start=100 * i)).last_device_node))
            full = b.cache.full_evictable_size() + b.cache.full_protected_size()
            assert full == tokens_of(b.cache.total_size()) == len(b.cache.all_values_flatten())
            assert b.cache.full_evictable_size() == b.cache.full_evictable_size()
        for receipt in held:
            b.cache.dec_lock_ref(receipt.lock.node, receipt)
        assert b.cache.full_protected_size() == 0
        b.check()

    # -- a long prefill -------------------------------------------------------------------

    def test_a_prefill_in_chunks_continues_from_its_lock(self, bench: Make) -> None:
        b = bench()
        req = started(b, prompt(10))
        for chunk in range(3):
            more = prompt(8, start=10 + 8 * chunk)
            for token in more:
                assert b.decode(req, token)
            req.origin_input_ids, req.output_ids = list(req.fill_ids), []
            b.cache.cache_unfinished_req(req, chunked=True)
            b.verify(req, req.committed)
            assert req.cache_protected_len == req.committed // 4 * 4
            assert torch.equal(
                req.prefix_indices[: req.committed],
                b.rows.req_to_token[req.req_pool_idx, : req.committed].long(),
            )
            b.check()
        b.finish(req)
        assert started(b, prompt(34)).device_tokens == 32

    # -- the whole ------------------------------------------------------------------------

    def test_reset_gives_every_slot_back(self, bench: Make) -> None:
        b = bench()
        free = b.allocator.available_size()
        for i in range(4):
            served(b, prompt(20, start=10 * i))
        assert b.allocator.available_size() < free
        b.cache.reset()
        assert b.allocator.available_size() == free and tokens_of(b.cache.total_size()) == 0
        assert served(b, prompt(20)).device_tokens == 0
        b.check()

    def test_a_lock_from_before_a_reset_is_void(self, bench: Make) -> None:
        b = bench()
        node, receipt = locked(b, prompt(20))
        b.cache.reset()
        served(b, prompt(20))
        assert b.cache.dec_lock_ref(node, receipt) == 0 and b.cache.full_protected_size() == 0
        b.check()

    def test_a_cache_that_is_off_never_reuses_and_never_leaks(self, bench: Make) -> None:
        b = bench(disable=True)
        free = b.allocator.available_size()
        assert b.cache.is_chunk_cache() and not b.cache.is_tree_cache()
        for _ in range(3):
            req = started(b, prompt(9))
            assert req.device_tokens == 0 and b.decode(req, 7)
            b.finish(req)
            assert b.allocator.available_size() == free

    def test_texts_a_person_can_read(self, bench: Make, capsys: pytest.CaptureFixture[str]) -> None:
        b = bench()
        served(b, prompt(20))
        b.cache.pretty_print()
        shown = capsys.readouterr().out
        assert "device" in shown and "hits" in shown
        free, evictable = b.allocator.available_size(), b.cache.full_evictable_size()
        text = b.cache.available_and_evictable_str()
        assert str(evictable) in text and str(free + evictable) in text
        b.cache.sanity_check()

    def test_figures_add_up(self, bench: Make) -> None:
        b = bench()
        served(b, prompt(20))
        req = started(b, prompt(20))
        assert b.decode(req, 7)  # a page of its own
        stats = b.cache.stats()
        assert (stats.device_protected, stats.device_evictable) == (20, 0)
        assert stats.device_total == stats.device_available + stats.device_protected + b.page_size
        window = stats.window
        assert (window is not None) == b.cache.supports_swa()
        if window is not None:
            assert (window.device_protected, window.device_evictable) == (
                b.cache.swa_protected_size(), b.cache.swa_evictable_size(),
            )  # fmt: skip
            assert window.device_protected >= 8, "a window of it"
            kept = window.device_protected + window.device_evictable
            assert window.device_total == window.device_available + kept + b.page_size
        b.finish(req)

    @pytest.mark.parametrize("page_size", [1, 4])
    @seeded
    @pytest.mark.parametrize("seed", seeds(2))
    def test_random_serving_is_exact_and_loses_no_slot(self, bench: Make, page_size: int, seed: int) -> None:
        b = bench(page_size)
        rng = random.Random(seed)

        def begin() -> Request | None:
            base = prompt(rng.randint(1, 4) * 4, start=100 * rng.randint(0, 4))
            space = {"extra_key": rng.choice([None, None, "x"])}
            tail = [rng.randint(900, 902) for _ in range(rng.randint(1, 12))]
            return b.start(base + tail, share=rng.random() < 0.8, **space)

        hits = sum(b.live(rng, 150, begin))
        assert b.cache.full_protected_size() == 0 and is_enough(hits > 50)
        b.cache.evict(EVERYTHING)
        assert tokens_of(b.cache.total_size()) == 0


class HostTierContract(_Contract):
    """For classes with a host tier; `make` gives one that writes through."""

    def test_what_was_evicted_comes_back_from_the_host(self, bench: Make) -> None:
        b = bench()
        served(b, prompt(21))
        b.cache.evict(EVERYTHING)
        assert tokens_of(b.cache.total_size()) == 0
        req = started(b, prompt(21))  # verifies what was loaded
        assert (req.device_tokens, req.host_tokens) == (0, 20)
        b.check()

    def test_a_promise_of_the_host_is_kept_whole_or_not_at_all(self, bench: Make) -> None:
        b = bench()
        served(b, prompt(40))
        b.cache.evict(EVERYTHING)
        match = found(b, prompt(40))
        assert (len(match.device_indices), match.host_hit_length) == (0, 40)
        blocker = b.allocator.alloc(b.allocator.available_size() - 36)
        indices, node = b.cache.init_load_back(match.last_host_node, 40)
        assert len(indices) == 0 and node is b.cache.root_node
        b.allocator.free(blocker)
        indices, node = b.cache.init_load_back(match.last_host_node, 40)
        assert len(indices) == 40 and node is match.last_host_node
        b.settle()
        b.check()

    @pytest.mark.parametrize("num_device", [0, 20])
    @pytest.mark.parametrize("num_other", [25, 33, 41, 61], ids=lambda n: f"other-{n}")
    def test_a_load_back_goes_on_from_the_prefix_that_was_matched(
        self, bench: Make, num_device: int, num_other: int
    ) -> None:
        """Whatever others have loaded since: prefix and answer skip no page, and repeat none."""
        b = bench()
        for num_tokens in (21, 25, 33, 41, 61):  # so that a match may end there, with windows too
            served(b, prompt(num_tokens))
        b.cache.evict(EVERYTHING)
        first = started(b, prompt(num_device + 1)) if num_device else None
        req = started(b, prompt(41), between=lambda: started(b, prompt(num_other)))  # verifies all of it
        assert (req.device_tokens, req.host_tokens) == (num_device, 40 - num_device)
        assert len(req.prefix_indices) == 41 and req.last_node.end * b.page_size == 40
        b.check()
        for running in (first, *b.running):
            if running in b.running:
                b.finish(running)
        b.settle()
        b.check()

    @pytest.mark.parametrize("num_device", [0, 20])
    @pytest.mark.parametrize("why", ["no room", "part of it there, no room", "gone from the host"])
    def test_a_load_back_that_is_refused_leaves_the_prefix_that_was_matched(
        self, bench: Make, num_device: int, why: str
    ) -> None:
        b = bench()
        for num_tokens in (21, 25, 41):
            served(b, prompt(num_tokens))
        b.cache.evict(EVERYTHING)
        if num_device:
            started(b, prompt(num_device + 1))
        match = found(b, prompt(41))
        held = b.cache.inc_lock_ref(match.last_device_node)
        if why == "gone from the host":
            b.cache.cache.supply.evict(Tier.HOST, 1000)
        if why == "part of it there, no room":
            started(b, prompt(25))
        blocker = b.allocator.alloc(b.allocator.available_size() - 8)
        slots, node = b.cache.init_load_back(match.last_host_node, match.host_hit_length)
        assert len(slots) == 0 and node.end * b.page_size == num_device == len(match.device_indices)
        b.cache.dec_lock_ref(b.cache.inc_lock_ref(node))
        b.cache.dec_lock_ref(held)
        b.allocator.free(blocker)
        b.settle()
        b.check()

    def test_a_load_back_behind_a_prefix_that_nobody_locked_is_refused(self, bench: Make) -> None:
        b = bench()
        for num_tokens in (21, 41):
            served(b, prompt(num_tokens))
        b.cache.evict(EVERYTHING)
        b.finish(started(b, prompt(21)))
        match = found(b, prompt(41))
        assert len(match.device_indices) == 20
        b.cache.evict(EVERYTHING)
        with pytest.raises(Misuse, match="not locked"):
            b.cache.init_load_back(match.last_host_node, 20, mem_quota=0)

    @pytest.mark.parametrize("length", [-4, 3, 44])
    def test_a_host_hit_of_a_length_that_no_match_gives_is_refused(self, bench: Make, length: int) -> None:
        b = bench()
        served(b, prompt(41))
        b.cache.evict(EVERYTHING)
        with pytest.raises(Misuse, match="host_hit_length"):
            b.cache.init_load_back(found(b, prompt(40)).last_host_node, length)

    def test_no_host_hit_crosses_a_namespace(self, bench: Make) -> None:
        b = bench()
        served(b, prompt(21), extra_key="a")
        b.cache.evict(EVERYTHING)
        assert started(b, prompt(21), extra_key="b").host_tokens == 0
        assert started(b, prompt(21), extra_key="a").host_tokens == 20

    def test_reset_empties_the_host_too(self, bench: Make) -> None:
        b = bench()
        served(b, prompt(20))
        stats = b.cache.stats()
        assert stats.host_used == 20 and (stats.window is None or 8 <= stats.window.host_used <= 20)
        b.cache.reset()
        stats = b.cache.stats()
        assert stats.host_used == 0 and (stats.window is None or stats.window.host_used == 0)
        assert started(b, prompt(20)).host_tokens == 0

    def test_close_while_copies_are_under_way_and_again(self, bench: Make) -> None:
        b = bench()
        reqs = [b.start(prompt(20, start=100 * i)) for i in range(4)]
        b.cache.close()
        b.cache.close()
        for req in reqs:
            assert req is not None
            b.verify(req, 20)
