"""Generation that is paused: SGLang takes no steps then, asks only whether it is idle, and may be flushed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.sglang.conftest import LENGTH
from tests.sglang.prompts import tokens
from tests.sglang.rig import NUM_TOKENS, Rig
from tests.sglang.server import Answer, Reference, Server, until
from tests.sglang.test_admin import keys
from tests.sglang.test_named_after_upstream import PROMPT, in_storage


def is_idle(rig: Rig) -> bool:
    """What SGLang's scheduler asks of the cache, in its order: all four each time."""
    cache = rig.cache
    under_way = cache.ongoing_write_through, cache.ongoing_load_back, cache.ongoing_prefetch
    return not any(map(len, (*under_way, cache.ongoing_backup)))


def becomes_idle(rig: Rig) -> bool:
    """Whether it does with workers that run but no step: the steps of a paused scheduler only ask."""
    for _ in range(20):
        if is_idle(rig):
            return True
        rig.driver.run()
    return False


def assert_flushed(rig: Rig) -> None:
    host = rig.cache.token_to_kv_pool_host
    rig.cache.reset()
    assert rig.allocator.available_size() == NUM_TOKENS and host.available_size() == host.logical_size
    rig.check()


def test_pages_on_their_way_down_arrive_while_generation_is_paused(tmp_path: Path) -> None:
    """They stayed under way until it went on, and a flush was refused for as long."""
    rig = Rig(tmp_path)
    rig.run(PROMPT + [1])
    assert not is_idle(rig)
    assert becomes_idle(rig)
    assert_flushed(rig)


def test_what_a_waiting_request_is_fetched_arrives_while_generation_is_paused(tmp_path: Path) -> None:
    rig = in_storage(tmp_path)
    req = rig.request(PROMPT + [1])
    handle = rig.prefetch(req)
    assert becomes_idle(rig)
    assert_flushed(rig)
    assert rig.cache.check_prefetch_progress(handle)
    assert rig.cache.pop_prefetch_loaded_span(handle) == (0, None)
    rig.admit(req)
    rig.finish(req)
    rig.settle()
    rig.check()


def test_a_load_whose_request_was_retracted_ends_while_generation_is_paused() -> None:
    rig = Rig()
    rig.run(PROMPT + [1])
    rig.settle()
    rig.evict_all()
    req = rig.request(PROMPT + [2])
    rig.admit(req)
    rig.abort(req)
    assert becomes_idle(rig)
    assert_flushed(rig)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_flushed_while_paused(ours: Server, reference: Reference, tmp_path: Path, mode: str) -> None:
    """Retracted requests wait and hold nothing: a flush is done. Those paused in place hold their pages."""
    ours.attach("file", keys(tmp_path), hicache_storage_prefetch_policy="wait_complete")
    asked = [tokens(LENGTH, f"{mode} {number}") for number in range(4)]
    answers: list[Answer] = []
    running = threading.Event()

    def ask(prompt: list[int]) -> None:
        answers.append(ours.ask(prompt, 40))

    threads = [threading.Thread(target=ours.read, args=(asked[0], 400, running))]
    threads += [threading.Thread(target=ask, args=(prompt,)) for prompt in asked]
    for thread in threads:
        thread.start()
    assert running.wait(300)
    assert ours.admin("POST", "/pause_generation", mode=mode).status_code == 200
    try:
        if mode == "retract":
            until(lambda: ours.admin("POST", "/flush_cache").status_code == 200)
        else:
            ours.admin("POST", "/flush_cache")  # refused while one of them runs
    finally:
        assert ours.admin("POST", "/continue_generation", torch_empty_cache=False).status_code == 200
    for thread in threads:
        thread.join(300)
    assert len(answers) == len(asked)
    reference.assert_same(answers)
