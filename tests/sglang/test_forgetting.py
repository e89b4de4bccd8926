"""What is forgotten over SGLang's real pools, in this process, while requests run and storage is asked."""

from __future__ import annotations

from pathlib import Path

from hiradix.intents import IntentState
from hiradix.intents.records import Selector
from hiradix.prefix_cache import RadixKey
from tests.sglang.rig import PAGE, Rig

PROMPT = [3 + n % 11 for n in range(8 * PAGE)]


def turn(rig: Rig) -> None:
    """All that is under way ends, and the scheduler takes a step."""
    rig.settle()
    rig.cache.check_hicache_events()


def test_a_request_in_its_first_pass_brings_nothing_back() -> None:
    rig = Rig()
    request = rig.request([*PROMPT, 1])
    rig.admit(request)
    receipt = rig.cache.inner.forget(Selector.prefix(RadixKey(PROMPT)), ("device", "host"))
    turn(rig)
    assert rig.cache.inner.intent(receipt.id).state is IntentState.DONE
    rig.finish(request)
    turn(rig)
    assert rig.match(rig.request([*PROMPT, 2])).device_prefix_len == 0
    rig.check()


def test_a_request_that_runs_on_brings_nothing_back() -> None:
    rig = Rig()
    request = rig.request([*PROMPT, 1])
    rig.admit(request)
    rig.cache.checkpoint(request, up_to=3 * PAGE)
    receipt = rig.cache.inner.forget(Selector.prefix(RadixKey(PROMPT)), ("device", "host"), wait_s=0.0)
    turn(rig)
    assert rig.cache.inner.intent(receipt.id).state is IntentState.EXPIRED, "the request runs on it"
    rig.finish(request)
    turn(rig)
    assert rig.match(rig.request([*PROMPT, 2])).device_prefix_len <= 3 * PAGE
    rig.check()


def test_what_is_being_forgotten_is_not_fetched(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    first, other = rig.request([*PROMPT, 1]), rig.request([*PROMPT, 2])
    rig.admit(first)
    rig.finish(first)
    turn(rig)
    rig.evict_all()
    rig.cache.reset()
    receipt = rig.cache.inner.forget(Selector.prefix(RadixKey(PROMPT)))
    rig.cache.check_hicache_events()
    assert rig.cache.inner.intent(receipt.id).state is IntentState.RUNNING
    other.refresh_fill_ids()
    assert not rig.cache.prefetch_from_storage(other.rid, rig.cache.root_node, PROMPT)
