"""Inside vLLM: each token of a prompt has one source, each computed one a reason, as the host tier knows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hiradix.explain import Reason
from tests.vllm_roles.mini_vllm import MiniVLLM, S, World
from tests.vllm_roles.test_life import request

PAGES = 4


def serve(vllm: MiniVLLM, name: str, first: int = 1, num_pages: int = PAGES, **fields: object) -> Any:
    """The spans of one request, served to its end."""
    vllm.add(request(name, num_pages, first=first, **fields))
    vllm.drain()
    return vllm.role.explanations.one(name)["spans"]


def shown(spans: Any) -> list[tuple[int, int, str]]:
    return [(one["start"], one["end"], one.get("reason", one["source"])) for one in spans]


def new(start: int, reason: Reason) -> list[tuple[int, int, str]]:
    """Computed from page `start` on, for a reason; and the last token."""
    return [(start * S, PAGES * S, reason.value), (PAGES * S, PAGES * S + 1, "boundary")]


def test_new_prompts_known_ones_and_ones_that_part() -> None:
    vllm = MiniVLLM(World(budget=40))
    assert shown(serve(vllm, "a")) == new(0, Reason.NEVER_SEEN)
    assert shown(serve(vllm, "b")) == [(0, PAGES * S, "host"), (PAGES * S, PAGES * S + 1, "boundary")]
    other = request("c", PAGES)
    other.all_token_ids[2 * S + 1] = 99
    vllm.add(other)
    vllm.drain()
    spans = vllm.role.explanations.one("c")["spans"]
    assert shown(spans) == [(0, 2 * S, "host"), *new(2, Reason.PARTED)]
    assert f"token {2 * S + 1} " in spans[1]["detail"]
    serve(vllm, "long", num_pages=16)
    assert shown(serve(vllm, "salted", num_pages=16, cache_salt="x"))[0] == (0, 16 * S, "other_namespace")


def test_what_left_the_host_and_why() -> None:
    vllm = MiniVLLM(World(budget=40, host_pages=PAGES))
    serve(vllm, "a")
    for number in range(3):
        serve(vllm, f"press {number}", first=10 * (number + 1))
    spans = serve(vllm, "again")
    assert shown(spans)[0][2] == Reason.EVICTED.value and "left the host by lru" in spans[0]["detail"]
    vllm.role.reset()
    assert shown(serve(vllm, "after a reset")) == new(0, Reason.FLUSHED)


def test_what_is_on_the_host_and_slower_than_computing_is_not_loaded() -> None:
    vllm = MiniVLLM(World(budget=40))
    serve(vllm, "a")
    gate: Any = vllm.role.no_regret
    gate.takes = lambda transfer, num_pages, *more: False
    assert shown(serve(vllm, "b")) == new(0, Reason.PREDICTED_SLOWER)


def test_a_load_that_was_weighed_for_an_earlier_lookup_counts_no_more() -> None:
    vllm = MiniVLLM(World(budget=40))
    serve(vllm, "a")
    gate: Any = vllm.role.no_regret
    gate.takes = lambda transfer, num_pages, *more: False
    one = request("b", PAGES + 2)
    vllm.role.arrived(one)
    assert vllm.role.lookup(one, 0) == 0, "slower than computing; and vLLM has no blocks for it yet"
    assert vllm.role.lookup(one, PAGES * S) == 0, "by now vLLM has them itself"
    vllm.role.allocated(one, lambda: [], 0)
    spans = shown(vllm.role.explanations.one("b")["spans"])
    assert spans[:2] == [(0, PAGES * S, "device"), (PAGES * S, (PAGES + 2) * S, Reason.NEVER_SEEN.value)]


def test_what_another_request_computes_at_the_same_time() -> None:
    vllm = MiniVLLM(World(budget=40))
    for name in ("a", "b"):
        vllm.add(request(name, PAGES))
    vllm.drain()
    assert shown(vllm.role.explanations.one("a")["spans"]) == new(0, Reason.NEVER_SEEN)
    assert shown(vllm.role.explanations.one("b")["spans"]) == new(0, Reason.NEVER_SEEN), "it was not here yet"
    waiting = MiniVLLM(World(budget=PAGES * S + 1, max_running=1))
    lookup: Any = waiting.index.find
    waiting.index.find = lambda key: replace(lookup(key), num_pages=0)  # type: ignore[method-assign]
    serve(waiting, "a")
    assert shown(serve(waiting, "b")) == new(0, Reason.UNDER_WAY), "on the host, and not to be loaded yet"


def test_what_storage_brings() -> None:
    store: list[dict[str, bytes]] = [{}]
    first = MiniVLLM(World(budget=40), store)
    serve(first, "a")
    again = MiniVLLM(World(budget=40), store)
    assert shown(serve(again, "b"))[0] == (0, PAGES * S, "storage")
    figures = again.role.take_stats()
    assert figures["computed_boundary_tokens"] == 1 and "computed_never_seen_tokens" not in figures


def test_a_request_that_reads_no_cache_is_not_explained() -> None:
    vllm = MiniVLLM(World(budget=40))
    serve(vllm, "a")
    vllm.add(request("b", PAGES, skip_reading_prefix_cache=True))
    vllm.drain()
    ids = [one["id"] for one in vllm.role.explanations.latest(None)["requests"]]  # type: ignore[attr-defined]
    assert ids == ["a"]
