"""The roles together, in a small vLLM whose model sees every wrong number it reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.adapters.vllm import requests
from hiradix.adapters.vllm.finished_requests import FinishedRequest, WriteBackSaves
from hiradix.adapters.vllm.requests import track
from hiradix.adapters.vllm.scheduler_plan import StepRequest
from hiradix.cache.foreign_device import NULL_BLOCK
from hiradix.policy import no_regret
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.transfer import JobKind
from hiradix.transfer.step_executor import NO_JOBS
from hiradix.tree import Tier
from hiradix.tree.hashing import PageRows, hash_pages
from tests.vllm_roles.mini_vllm import FakeFeature, FakeLora, FakeRequest, FakeSpan, MiniVLLM, S, World


def request(name: str, num_pages: int, max_tokens: int = 2, first: int = 1, **fields: object) -> FakeRequest:
    tokens = [first + i % 5 for i in range(num_pages * S + 1)]
    return FakeRequest(name, tokens, max_tokens, **fields)  # type: ignore[arg-type]


def under_way(vllm: MiniVLLM, kind: JobKind) -> int:
    """Transfers of a kind that not every worker has answered."""
    return len(vllm.index.in_flight.of_kind(kind))


WORLDS = {
    "sync": World(),
    "async": World(load_async=True),
    "two workers": World(num_workers=2, load_async=True),
    "window": World(window=6, load_async=True, num_blocks=32),
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_a_repeat_is_loaded_from_the_host(world: World) -> None:
    vllm = MiniVLLM(world)
    vllm.add(request("a", 4))
    vllm.drain()
    assert vllm.role.figures.saved_pages == 4 and vllm.hit_tokens == 0
    vllm.add(request("b", 4))
    vllm.drain()
    assert vllm.hit_tokens == 4 * S
    assert vllm.role.figures.loaded_pages == 4 and vllm.role.figures.saved_pages == 4
    assert [r.all_token_ids for r in vllm.done][0] == [r.all_token_ids for r in vllm.done][1]


@pytest.mark.parametrize(("load_async", "times"), [(False, 1), (True, 0)])
def test_only_loads_for_the_step_make_layers_wait(load_async: bool, times: int) -> None:
    vllm = MiniVLLM(World(load_async=load_async))
    role, waits = vllm.ranks[0].role, []
    whole = role.start_loads
    role.start_loads = lambda orders: waits.append(whole(orders)) or waits[-1]  # type: ignore[method-assign]
    for name in "ab":
        vllm.add(request(name, 4))
        vllm.drain()
    assert vllm.hit_tokens == 4 * S
    assert waits.count(True) == times


def test_figures_are_told_once() -> None:
    vllm = MiniVLLM(World())
    vllm.add(request("a", 4))
    vllm.drain()
    computed = {"computed_never_seen_tokens": 4 * S, "computed_boundary_tokens": 1}
    assert vllm.role.take_stats() == {"saved_pages": 4, **computed}
    assert vllm.role.take_stats() == {}
    vllm.add(request("b", 4))
    vllm.drain()
    assert vllm.role.take_stats() == {"hit_tokens": 4 * S, "loaded_pages": 4, "computed_boundary_tokens": 1}
    assert vllm.role.take_stats() == {}


def test_answers_are_saved_too_and_the_next_turn_finds_them() -> None:
    vllm = MiniVLLM(World())
    first = request("a", 2, max_tokens=8)
    vllm.add(first)
    vllm.drain()
    turn = FakeRequest("b", [*first.all_token_ids, 7, 7], 2)
    vllm.add(turn)
    vllm.drain()
    computed = first.num_tokens - 1  # nothing was computed of the last answered token
    assert vllm.hit_tokens == computed // S * S > 2 * S


@pytest.mark.parametrize("fields", [{"cache_salt": "x"}, {"lora_request": FakeLora("l", "no/such")}])
def test_namespaces_are_apart(fields: dict[str, object]) -> None:
    vllm = MiniVLLM(World())
    for name, extra in (("a", {}), ("b", fields), ("c", fields)):
        vllm.add(request(name, 3, **extra))
        vllm.drain()
    assert vllm.hit_tokens == 3 * S, "the third finds the second's alone"


@pytest.mark.parametrize("salt", ["\ud800", 7, b"x", ("a",)], ids=ascii)
def test_a_salt_that_is_no_text_is_served_without_the_cache(
    salt: object, caplog: pytest.LogCaptureFixture
) -> None:
    vllm = MiniVLLM(World())
    for name in ("a", "b"):
        vllm.add(request(name, 2, cache_salt=salt))
        vllm.drain()
    assert vllm.hit_tokens == 0 and vllm.role.take_stats() == {"not_text": 2}
    assert caplog.text.count("cache_salt: ") == 1 and "nothing is cached" in caplog.text


def test_an_adapter_trained_further_is_another_where_vllm_loads_it_again(tmp_path: Path) -> None:
    """Same name, same folder. vLLM loads it again under another number, or for each step if told to. What it
    was not told to load again it may have all the same, where it had no room for it: nobody can know."""
    folder = tmp_path / "adapter"
    folder.mkdir()

    def train(weights: bytes) -> None:
        (folder / "adapter_model.bin").write_bytes(weights)
        os.utime(folder / "adapter_model.bin", ns=(0, next(times)))

    def hits(**fields: Any) -> int:
        before = vllm.hit_tokens
        vllm.add(request(f"r{len(vllm.done)}", 3, lora_request=FakeLora("l", str(folder), **fields)))
        vllm.drain()
        return vllm.hit_tokens - before

    vllm, times = MiniVLLM(World()), count()
    train(b"first")
    assert [hits(), hits()] == [0, 3 * S]
    train(b"first")
    (folder / "optimizer.log").write_text("beside the weights")
    assert hits() == 3 * S, "the same again"
    train(b"second")
    saved = vllm.role.figures.saved_pages
    assert [hits(), hits()] == [0, 0] and vllm.role.figures.saved_pages == saved
    train(b"first")
    assert hits() == 0, "or has what was there meanwhile"
    train(b"second")
    assert [hits(lora_int_id=2), hits(lora_int_id=2)] == [0, 3 * S]
    train(b"number three")
    assert [hits(lora_int_id=2, load_inplace=True) for _ in range(2)] == [0, 3 * S]
    train(b"as it was 4.")
    assert hits(lora_int_id=2, load_inplace=True) == 0


def test_an_adapter_whose_files_go_while_they_are_looked_at_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what a training run renames just then."""
    vllm, folder = MiniVLLM(World()), tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.bin").write_bytes(b"weights")
    hits = []
    for name in "abcd":
        before = vllm.hit_tokens
        with monkeypatch.context() as gone:
            if name in "ab":
                gone.setattr(requests, "decides", lambda file, _: file.with_name("gone").stat())
            vllm.add(request(name, 3, lora_request=FakeLora("l", str(folder), load_inplace=name < "d")))
        vllm.drain()
        hits.append(vllm.hit_tokens - before)
    assert hits == [0, 0, 0, 3 * S] and vllm.role.figures.saved_pages == 3
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["request a", "request b"]


def test_images_are_apart() -> None:
    """The tokens are the same in all; what they stand for, and where it begins, is not."""
    vllm = MiniVLLM(World())
    images = [("cat", 5), ("dog", 5), ("cat", 6), ("cat", 5), ("dog", 5)]
    hits = []
    for number, (name, offset) in enumerate(images):
        image = FakeFeature(name, FakeSpan(offset, 4))
        vllm.add(request(f"r{number}", 3, mm_features=[image]))
        vllm.drain()
        hits.append(vllm.hit_tokens - sum(hits))
    assert hits == [0, S, S, 3 * S, 3 * S], "the first page has nothing of the image"


def test_a_name_for_an_image_is_not_taken_for_two_images() -> None:
    """Clients may name their images themselves, as they like."""
    two = [FakeFeature("cat", FakeSpan(0, 2)), FakeFeature("dog", FakeSpan(2, 2))]
    one = [FakeFeature("cat 0 2\ndog", FakeSpan(2, 2))]
    keys = [track(request("r", 2, mm_features=features), S) for features in (two, one)]
    assert keys[0] is not None and keys[1] is not None
    assert keys[0].extras != keys[1].extras


def test_prompts_of_embeddings_and_streams_are_left_alone() -> None:
    vllm = MiniVLLM(World())
    for name, fields in (("a", {"prompt_embeds": object()}), ("b", {"resumable": True})):
        vllm.add(request(name, 3, **fields))
        vllm.drain()
    assert vllm.role.figures.saved_pages == 0 and not vllm.role.requests


@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_load_that_fails_is_computed_again(load_async: bool, num_workers: int) -> None:
    vllm = MiniVLLM(World(load_async=load_async, num_workers=num_workers))
    vllm.add(request("a", 4))
    vllm.drain()
    vllm.ranks[-1].transports[0].fails = 1
    vllm.add(request("b", 4))
    vllm.drain()
    assert vllm.num_recomputed == 1 and vllm.role.figures.load_failed == 1
    assert len(vllm.done) == 2
    vllm.add(request("c", 4))
    vllm.drain()
    assert vllm.hit_tokens == 2 * 4 * S, "the recomputed pages were saved again and hit"


def test_what_was_computed_beside_a_failed_load_is_not_saved() -> None:
    vllm = MiniVLLM(World(budget=40))
    vllm.add(request("a", 4))
    vllm.drain()
    vllm.ranks[0].transports[0].fails = 1
    vllm.add(request("b", 6))
    vllm.drain()
    assert vllm.role.figures.save_failed_pages == 2, "the two pages of the step whose load failed"


def test_a_save_that_fails_is_never_served() -> None:
    vllm = MiniVLLM(World())
    vllm.ranks[0].transports[0].fails = 1
    vllm.add(request("a", 2, max_tokens=1))
    vllm.drain()
    assert vllm.role.figures.save_failed_pages == 2
    vllm.add(request("b", 3))
    vllm.drain()
    assert vllm.hit_tokens == 0 and vllm.role.figures.saved_pages == 3


def test_a_lookup_without_a_load_pins_nothing() -> None:
    vllm = MiniVLLM(World())
    vllm.add(request("a", 4))
    vllm.drain()
    probe = request("b", 4)
    vllm.role.arrived(probe)
    for _ in range(3):
        assert vllm.role.lookup(probe, 0) == 4 * S
    assert vllm.index.tree.evictable_pages(1) == 4
    vllm.role.finished(probe, [[]])
    assert vllm.role.is_idle


def test_pages_on_their_way_are_waited_for_and_not_copied_twice() -> None:
    vllm = MiniVLLM(World(budget=40))
    vllm.ranks[0].driver.held.add("write")
    vllm.add(request("a", 3, max_tokens=1))
    vllm.step()
    probe = request("b", 3)
    vllm.role.arrived(probe)
    assert vllm.role.lookup(probe, 0) is None
    vllm.now_s += 1.0
    assert vllm.role.lookup(probe, 0) == 0, "a save that hangs holds nobody for long"
    vllm.role.finished(probe, [[]])
    vllm.ranks[0].driver.held.clear()
    vllm.drain()
    assert vllm.role.figures.saved_pages == 3


def test_a_block_used_again_waits_for_the_copy_that_reads_it() -> None:
    """Every block is in use again at once; without the fence the save reads the next request's numbers."""
    vllm = MiniVLLM(World(num_blocks=6, budget=40, max_running=1))
    for name in "abcd":
        vllm.add(request(name, 4, max_tokens=1, first=ord(name)))
    vllm.drain()
    assert vllm.role.figures.fences > 0
    for name in "abcd":
        vllm.add(request(name + "2", 4, max_tokens=1, first=ord(name)))
    vllm.drain()
    assert vllm.hit_tokens > 0


def test_a_new_process_finds_what_the_first_stored() -> None:
    store: list[dict[str, bytes]] = [{}, {}]
    for load_async in (False, True):
        vllm = MiniVLLM(World(num_workers=2, load_async=load_async), store)
        vllm.add(request("a", 4))
        vllm.drain()
        assert vllm.hit_tokens == (4 * S if load_async else 0)
        assert vllm.role.figures.stored_pages == (0 if load_async else 4)
    assert vllm.role.prefetch_figures.read == 4


def names(one: FakeRequest) -> list[str]:
    """What storage calls the pages of a request."""
    rows = np.array(one.all_token_ids[: one.num_tokens // S * S], np.int64).reshape(-1, S)
    return [digest.hex() for digest in hash_pages(PageRows(b"", rows))]


WINDOW = World(window=6, load_async=True, num_blocks=48, budget=40)  # two pages behind a boundary


def stored(num_pages: int, num_workers: int = 1) -> list[dict[str, bytes]]:
    """What the pages of request "a" are in storage, those of windows under names that end in "@1"."""
    store: list[dict[str, bytes]] = [{} for _ in range(num_workers)]
    vllm = MiniVLLM(replace(WINDOW, num_workers=num_workers), store)
    vllm.add(request("a", num_pages, max_tokens=1))
    vllm.drain()
    wanted = sorted(name + part for name in names(request("a", num_pages)) for part in ("", "@1"))
    assert all(sorted(pages) == wanted for pages in store)
    return store


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(
    ("gone", "hits"),
    [
        ((), 6),
        (("5@1",), 5),
        (("4@1",), 4),
        (("5@1", "3@1"), 3),
        (("4@1", "1@1"), 4),
        (("2",), 2),
        (("2", "1@1"), 1),
    ],
)
def test_windows_come_back_behind_the_deepest_boundary_that_has_them(
    num_workers: int, gone: tuple[str, ...], hits: int
) -> None:
    """gone: pages that storage, of the last worker, has lost; with "@1" the window's."""
    store, pages = stored(6, num_workers), names(request("a", 6))
    for which in gone:
        number, at, part = which.partition("@")
        del store[-1][pages[int(number)] + at + part]
    vllm = MiniVLLM(replace(WINDOW, num_workers=num_workers), store)
    vllm.add(request("a", 6))
    vllm.drain()
    assert vllm.hit_tokens == hits * S
    held = [vllm.index.tree.resident_pages(1, component) for component in (0, 1)]
    assert held[0] == 6 and held[1] >= min(2, hits), "the rest was computed and saved"


@settings(max_examples=60)
@given(full=st.sets(st.integers(0, 7)), window=st.sets(st.integers(0, 7)), on_host=st.integers(0, 8))
def test_whatever_storage_has_lost_the_hit_ends_where_all_is_there(
    full: set[int], window: set[int], on_host: int
) -> None:
    """on_host: leading pages that another request has brought to the host, with the windows they end in."""
    store, pages = stored(8), names(request("a", 8))
    vllm = MiniVLLM(WINDOW, store)
    if on_host:
        vllm.add(request("b", on_host, max_tokens=1))
        vllm.drain()
    before = vllm.hit_tokens
    lost = [pages[page] for page in full] + [pages[page] + "@1" for page in window]
    for name in lost:
        del store[0][name]
    held = [{page for page in range(on_host)}, {page for page in range(on_host - 2, on_host)}]
    there = [({*range(8)} - full) | held[0], ({*range(8)} - window) | held[1]]
    ends = [
        end for end in range(9) if {*range(end)} <= there[0] and {*range(max(0, end - 2), end)} <= there[1]
    ]
    vllm.add(request("c", 8, max_tokens=1))
    vllm.drain()
    assert vllm.hit_tokens - before == max(ends) * S


def test_only_the_windows_are_fetched_that_the_hit_needs() -> None:
    vllm = MiniVLLM(WINDOW, stored(6))
    probe = request("b", 6)
    vllm.role.arrived(probe)
    vllm.run(lambda: vllm.role.lookup(probe, 0) is not None)
    assert vllm.role.lookup(probe, 0) == 6 * S
    assert [vllm.index.tree.resident_pages(1, component) for component in (0, 1)] == [6, 2]
    vllm.role.finished(probe, [[], []])
    vllm.drain()


def test_windows_that_left_the_host_come_back_alone() -> None:
    """The host has full attention's pages, but not what a boundary needs of the windows."""
    vllm = MiniVLLM(WINDOW, stored(6))
    vllm.add(request("b", 6, max_tokens=1))
    vllm.drain()
    tree = vllm.index.tree
    vllm.index.supply.evict(Tier.HOST, 6, 1)
    assert tree.resident_pages(1, 1) == 0 and vllm.hit_tokens == 6 * S
    vllm.add(request("c", 6, max_tokens=1))
    vllm.drain()
    assert vllm.hit_tokens == 12 * S
    assert vllm.role.prefetch_figures.asked == 6, "for the windows alone storage was asked the second time"


def test_a_fetch_asks_for_as_much_as_the_host_has_room_for() -> None:
    vllm = MiniVLLM(replace(WINDOW, host_pages=1), stored(6))
    vllm.add(request("b", 6, max_tokens=1))
    vllm.drain()
    assert vllm.hit_tokens == S and len(vllm.done) == 1


def test_storage_that_only_one_worker_has_is_no_hit() -> None:
    store: list[dict[str, bytes]] = [{}, {}]
    first = MiniVLLM(World(num_workers=2), store)
    first.add(request("a", 4))
    first.drain()
    third = sorted(store[1])[2]
    del store[1][third]
    second = MiniVLLM(World(num_workers=2), store)
    second.add(request("a", 4))
    second.drain()
    assert 0 <= second.hit_tokens < 4 * S


def test_a_request_goes_on_at_the_prefetchs_deadline() -> None:
    store: list[dict[str, bytes]] = [{}]
    first = MiniVLLM(World(), store)
    first.add(request("a", 4))
    first.drain()
    late = MiniVLLM(World(prefetch_policy="timeout"), store)
    late.ranks[0].driver.held.add("fetch")
    late.add(request("b", 4))
    late.step()
    assert late.waiting and not late.running
    late.now_s += 5.0
    late.run(lambda: bool(late.done))
    assert late.hit_tokens == 0
    late.ranks[0].driver.held.clear()
    late.drain()


def test_reads_that_bring_nothing_become_rare_until_one_brings_something() -> None:
    store: list[dict[str, bytes]] = [{}]
    prompts = [request(f"a{n}", 4, first=1 + 10 * n) for n in range(24)]
    first = MiniVLLM(World(), store)
    for one in prompts:
        first.add(one)
        first.drain()
    later = MiniVLLM(World(no_regret=True), store)
    later.role.meter.planned = lambda *_: None  # type: ignore[method-assign]  # nobody knows what computing costs
    storage = later.ranks[0].storage
    storage.fault = "get nothing"
    for n in range(24):
        if n == 16:
            storage.fault = ""
        later.add(request(f"b{n}", 4, first=1 + 10 * n))
        later.drain()
    figures = later.role.prefetch_figures
    assert figures.found == 24 * 4 and figures.left_out == (1 + 2 + 4 + 8) * 4
    assert figures.read == 3 * 4
    assert later.role.take_stats()["prefetch_left_out_pages"] == figures.left_out


def test_a_read_is_worth_what_its_tokens_are(monkeypatch: pytest.MonkeyPatch) -> None:
    store: list[dict[str, bytes]] = [{}]
    first = MiniVLLM(World(), store)
    first.add(request("a", 4))
    first.drain()
    told: list[tuple[int, int, int]] = []

    def worth_s(*numbers: int) -> float:
        told.append(numbers)  # type: ignore[arg-type]
        return 1.0

    monkeypatch.setattr(no_regret, "worth_s", worth_s)
    later = MiniVLLM(World(no_regret=True), store)
    later.add(request("b", 4))
    later.drain()
    assert told == [(4, 4, 4 * S)]


def test_a_request_that_reads_no_cache_asks_no_storage() -> None:
    """As one that wants log probabilities of its prompt: what is computed is saved all the same."""
    vllm = slow("wait_complete", 4)
    probe = request("b", 4, first=1, skip_reading_prefix_cache=True)
    vllm.role.arrived(probe)
    assert vllm.role.lookup(probe, 0) == 0
    assert vllm.role.step([], lambda request_id: []).jobs is NO_JOBS and not len(vllm.role.prefetcher)
    vllm.role.finished(probe, [[]])
    vllm.add(request("c", 4))
    vllm.drain()
    assert vllm.hit_tokens == 4 * S


LONG = 32  # pages of a prompt that storage has, which a slow one gives two at a time


def slow(policy: str, num_pages: int = LONG) -> MiniVLLM:
    """A process whose storage has a long prompt; of the engine's steps, two are a call of its storage."""
    store: list[dict[str, bytes]] = [{}]
    first = MiniVLLM(World(num_blocks=64, host_pages=40, budget=200), store)
    first.add(request("a", num_pages, max_tokens=1))
    first.drain()
    world = World(num_blocks=64, host_pages=40, budget=200, prefetch_policy=policy, batch_pages=2)
    vllm = MiniVLLM(world, store)
    limits = PrefetchLimits(S, threshold_tokens=S, timeout_base_s=0.2, timeout_s_per_ki_token=0.0)
    vllm.role.prefetcher.policy = PrefetchPolicy(policy, limits)
    return vllm


def steps(vllm: MiniVLLM, wanted: Callable[[], bool]) -> None:
    """As its `run`, with storage at half the pace."""
    while not wanted():
        vllm.ranks[0].driver.step()
        vllm.step()
        vllm.step()


def goes_on(vllm: MiniVLLM, name: str, stop: bool = False) -> None:
    """Steps until this one reads. stop: and storage answers no more then."""
    vllm.add(request(name, LONG, max_tokens=1))
    vllm.run(lambda: under_way(vllm, JobKind.READ))
    if stop:
        vllm.ranks[0].driver.held.add("fetch")


def test_what_a_slow_storage_has_given_at_the_deadline_is_used() -> None:
    """And the rest is not read: its host pages are free, and storage is asked for what others want."""
    vllm = slow("timeout")
    goes_on(vllm, "b")
    steps(vllm, lambda: bool(vllm.running or vllm.done))
    assert vllm.now_s < 0.215, "it went on at the deadline"
    assert 8 * S <= vllm.hit_tokens < LONG * S
    vllm.drain()
    assert vllm.hit_tokens == (vllm.role.prefetch_figures.read - vllm.role.prefetch_figures.late) * S
    assert vllm.role.prefetch_figures.late <= 2, "the batch that was being read"


def test_a_storage_that_answers_no_more_holds_nobody_beyond_the_deadline() -> None:
    vllm = slow("timeout")
    goes_on(vllm, "b", stop=True)
    while not vllm.done:
        vllm.step()
        assert vllm.now_s <= 0.25
    assert vllm.hit_tokens == 0
    vllm.ranks[0].driver.held.clear()
    vllm.drain()


@pytest.mark.parametrize("ends", ["abort", "reset"])
def test_a_read_for_nobody_ends_with_its_batch(ends: str) -> None:
    """Its host pages are free after one more call of storage, not when all of a long prompt has been read."""
    vllm = slow("wait_complete")
    goes_on(vllm, "b")
    if ends == "abort":
        vllm.abort(vllm.waiting[0])
    else:
        vllm.role.reset()
    for _ in range(4):
        vllm.step()
        vllm.ranks[0].driver.step()
    vllm.step()
    assert not len(vllm.role.prefetcher), "it still reads"
    assert vllm.role.prefetch_figures.read <= (8 if ends == "abort" else 0)
    vllm.role.check()
    vllm.drain()


def test_a_reset_forgets_everything_at_once_and_frees_what_is_in_use_later() -> None:
    vllm = MiniVLLM(World(budget=40))
    vllm.add(request("a", 4))
    vllm.drain()
    vllm.ranks[0].driver.held.add("write")
    vllm.add(request("b", 5, first=50))
    vllm.step()
    vllm.role.reset()
    for name, first in (("a", 1), ("b", 50)):
        probe = request(name + "2", 4, first=first)
        vllm.role.arrived(probe)
        assert vllm.role.lookup(probe, 0) == 0
        vllm.role.finished(probe, [[]])
    vllm.ranks[0].driver.held.clear()
    vllm.drain()


def after_a_request(policy: str) -> MiniVLLM:
    """One that has computed blocks 1 to 3 and ended, with no step since."""
    vllm = MiniVLLM(World(write_policy=policy))
    one = request("a", 3)
    vllm.role.arrived(one)
    vllm.role.allocated(one, lambda: [[1, 2, 3]], 0)
    one.num_computed_tokens = 3 * S
    vllm.role.finished(one, [[1, 2, 3]])
    return vllm


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_a_request_left_before_a_reset_is_not_saved_after_it(policy: str) -> None:
    """As after a change of weights: it ends, the cache is reset, and only then is there a step again."""
    vllm = after_a_request(policy)
    vllm.role.reset()
    orders = vllm.role.step([StepRequest("b", 1, [3])], lambda request_id: [[3]])
    assert orders.jobs.saves == ()


@pytest.mark.parametrize(
    ("policy", "saved", "num_fences"),
    [("write_through", [[[1]]], 0), ("write_through_selective", [], 0), ("write_back", [[[1, 2, 3]]], 1)],
)
def test_a_step_waits_for_what_a_request_left_only_under_write_back(
    policy: str, saved: list[list[list[int]]], num_fences: int
) -> None:
    """Else what this step writes to, and what is behind it, is not saved."""
    vllm = after_a_request(policy)
    orders = vllm.role.step([StepRequest("b", 1, [2])], lambda request_id: [[2]])
    assert [[copy.source.tolist() for copy in save.copies] for save in orders.jobs.saves] == saved
    assert len(orders.fences) == num_fences and all(save.before_forward for save in orders.jobs.saves)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_worker_that_ends_waits_for_storage_up_to_its_deadline(hangs: bool) -> None:
    store: list[dict[str, bytes]] = [{}]
    vllm = MiniVLLM(World(budget=40), store)
    (rank,) = vllm.ranks
    rank.driver.held.add("store")
    vllm.add(request("a", 4))
    vllm.run(lambda: bool(vllm.done))
    assert not store[0]
    if not hangs:
        rank.driver.held.clear()
    begin_s = rank.driver.now()
    rank.role.close(5.0)
    assert len(store[0]) == (0 if hangs else 4)
    assert (5.0 <= rank.driver.now() - begin_s < 10.0) is hangs
    rank.role.close(5.0)


WRITE_BACK = World(write_policy="write_back", num_blocks=8, budget=40)


def test_write_back_saves_a_prompt_whole_when_its_first_block_is_taken() -> None:
    vllm = MiniVLLM(WRITE_BACK)
    vllm.add(request("a", 4, max_tokens=1))
    vllm.drain()
    assert vllm.role.figures.saved_pages == 0, "vLLM has it all"
    vllm.free.sort(key=lambda block: block == 4)  # a's last whole page is taken, and no other of its blocks
    vllm.add(request("b", 1, max_tokens=1, first=50))
    vllm.drain()
    assert vllm.role.figures.saved_pages == 4 and vllm.role.figures.fences == 1
    vllm.add(request("c", 4, max_tokens=1))
    vllm.drain()
    assert vllm.hit_tokens == 4 * S


def test_blocks_of_two_requests_are_saved_for_both_as_far_as_they_are_still_there() -> None:
    """As vLLM's prefix cache has it: the second request uses the first two blocks of the first."""
    book, first, second = WriteBackSaves(), *(track(request(name, 4), S) for name in "ab")
    assert first is not None and second is not None
    book.leave(FinishedRequest(first, 4, ((1, 2, 3, 4, 9),)))
    book.leave(FinishedRequest(second, 3, ((1, 2, 7),)))
    assert book.taken([8, 9]) == [], "block 9 had no whole page"
    assert book.taken([2, 7]) == [FinishedRequest(second, 3, ((1, 2, 7),))], (
        "the step has not written to them yet"
    )
    assert book.taken([4]) == [FinishedRequest(first, 4, ((1, NULL_BLOCK, 3, 4),))]
    assert book.taken([1, 2, 3, 4, 7]) == []


def test_write_back_of_a_whole_life_then_a_reset() -> None:
    vllm = MiniVLLM(WRITE_BACK)
    for name, first in (("a", 1), ("b", 50), ("a2", 1), ("b2", 50)):
        vllm.add(request(name, 4, first=first))
        vllm.drain()
    assert vllm.hit_tokens == 2 * 4 * S
    vllm.role.reset()
    saved = vllm.role.figures.saved_pages
    vllm.add(request("c", 4, first=90))
    vllm.drain()
    assert vllm.role.figures.saved_pages == saved, "what was on the device before a reset is nobody's"


def test_selective_writes_save_what_is_used_again() -> None:
    """vLLM's own prefix cache says what is: its hits are what is saved."""
    vllm = MiniVLLM(World(write_policy="write_through_selective"))
    vllm.add(request("a", 3))
    vllm.drain()
    assert vllm.role.figures.saved_pages == 0
    again = request("b", 3)
    vllm.role.arrived(again)
    assert vllm.role.lookup(again, 2 * S) == 0
    vllm.role.allocated(again, lambda: [[1, 2, 3, 4]], 0)
    again.num_computed_tokens = 2 * S
    (save,) = vllm.role.step([StepRequest("b", S, [3])], lambda request_id: [[1, 2, 3]]).jobs.saves
    assert [copy.source.tolist() for copy in save.copies] == [[1, 2]]


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_steps_of_an_answer_that_fill_no_page_are_quiet(policy: str) -> None:
    vllm = MiniVLLM(World(write_policy=policy))
    vllm.add(request("a", 2, max_tokens=5 * S))
    vllm.drain()
    assert vllm.num_quiet >= 5, "at least one of the four steps of each page"


def test_storage_that_is_asked_for_ends_the_quiet() -> None:
    vllm = MiniVLLM(World())
    vllm.add(request("a", 2, max_tokens=5 * S))
    vllm.run(lambda: vllm.num_quiet > 2)
    vllm.role.storage.ask("fake", {})
    assert vllm.role.quiet_step([]) is None
    assert [order.name for order in vllm.step().storage] == ["fake"]
    vllm.drain()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("steps", [1, 4])
def test_what_runs_over_a_reset_is_found_by_nobody(policy: str, steps: int) -> None:
    """vLLM resets connectors while requests run, too, as by `/reset_prefix_cache?reset_external=true`."""
    vllm = MiniVLLM(World(write_policy=policy, num_blocks=12, budget=6))
    vllm.add(request("a", 4, max_tokens=6))
    for _ in range(steps):
        vllm.step()
        vllm.ranks[0].driver.run()
    vllm.update_weights(preempts=False)
    vllm.drain()
    for name, first in (("b", 1), ("c", 60), ("d", 1)):
        vllm.add(request(name, 4, first=first))
        vllm.drain()
    assert vllm.hit_tokens == 4 * S, "b's pages, and not a's"


def test_what_begins_again_after_a_reset_is_saved() -> None:
    vllm = MiniVLLM(World(budget=6))
    vllm.add(request("a", 4))
    vllm.step()
    vllm.update_weights(preempts=True)
    vllm.drain()
    vllm.add(request("b", 4))
    vllm.drain()
    assert vllm.num_preempted == 1 and vllm.hit_tokens == 4 * S


@pytest.mark.parametrize("num_workers", [1, 2])
def test_storage_of_before_a_reset_is_found_by_nobody(num_workers: int) -> None:
    """Nor may a later process, with the weights that the first was started with, find what came after it."""
    store: list[dict[str, bytes]] = [{} for _ in range(num_workers)]
    world = World(num_workers=num_workers)
    vllm = MiniVLLM(world, store)
    hits = []

    def asked(first: int = 1) -> None:
        before = vllm.hit_tokens
        vllm.add(request(f"r{len(vllm.done)}", 4, first=first))
        vllm.drain()
        hits.append(vllm.hit_tokens - before)

    asked()
    vllm.update_weights(preempts=True)
    vllm.run(lambda: vllm.role.has_storage)
    asked()
    vllm.index.lose_all()
    asked()
    asked(50)
    vllm = MiniVLLM(world, store)
    asked()
    asked(50)
    assert hits == [0, 0, 4 * S, 0, 4 * S, 0]


def test_a_save_that_a_reset_overtakes_is_not_stored_as_new() -> None:
    """Its copy takes so long that storage has another name when the pages are there."""
    store: list[dict[str, bytes]] = [{}]
    vllm = MiniVLLM(World(budget=40), store)
    driver = vllm.ranks[0].driver
    driver.held.add("write")
    vllm.add(request("a", 3, max_tokens=1))
    vllm.run(lambda: bool(vllm.done))
    vllm.update_weights(preempts=True)
    vllm.run(lambda: vllm.role.has_storage)
    assert under_way(vllm, JobKind.WRITE) and not store[0]
    driver.held.clear()
    vllm.drain()
    assert not store[0] and vllm.role.figures.store_failed_pages == 3


def test_a_reset_while_storage_is_switched_opens_it_once_more() -> None:
    vllm = MiniVLLM(World(), [{}])
    vllm.role.storage.ask("fake", {})
    vllm.step()
    vllm.update_weights(preempts=True)
    switch, labels = vllm.ranks[0].role.switch, []
    whole = switch.open_storage

    def opened(name: str, keys: Any, label: str) -> Any:
        labels.append((label, vllm.role.has_storage))
        return whole(name, keys, label)

    switch.open_storage = opened
    vllm.run(lambda: vllm.role.has_storage)
    assert [(bool(label), had) for label, had in labels] == [(False, False), (True, False)]


def test_a_detached_storage_stays_so_over_a_reset() -> None:
    vllm = MiniVLLM(World(), [{}])
    vllm.role.storage.ask(None, {})
    vllm.run(lambda: not vllm.role.has_storage and not vllm.ranks[0].switching)
    vllm.update_weights(preempts=True)
    assert vllm.step().storage == ()
