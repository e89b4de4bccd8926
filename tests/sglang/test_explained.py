"""Inside SGLang: why what was computed had to be. Each request of the rig is checked to add up."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

from hiradix.explain import Reason
from tests.sglang.rig import NUM_TOKENS, PAGE, Rig

PROMPT = list(range(1, 8 * PAGE + 2))


def spans_of(rig: Rig, tokens: list[int], **namespace: Any) -> list[tuple[int, int, str]]:
    rig.run(tokens, **namespace)
    rig.settle()
    assert rig.cache.explainer is not None
    told: Any = rig.cache.explainer.recent.latest("1")
    return [
        (one["start"], one["end"], one.get("reason", one["source"])) for one in told["requests"][0]["spans"]
    ]


def test_new_prompts_known_ones_and_ones_that_part() -> None:
    rig, whole = Rig(), 8 * PAGE
    last = (whole, whole + 1, "boundary")
    assert spans_of(rig, PROMPT) == [(0, whole, "never_seen"), last]
    assert spans_of(rig, PROMPT) == [(0, whole, "device"), last]
    other = list(PROMPT)
    other[5 * PAGE + 1] = 999
    assert spans_of(rig, other) == [(0, 5 * PAGE, "device"), (5 * PAGE, whole, "parted"), last]


def test_evicted_flushed_and_on_the_host() -> None:
    rig, whole = Rig(), 8 * PAGE
    spans_of(rig, PROMPT)
    for number in range(NUM_TOKENS // whole):
        spans_of(rig, list(range(1000 * (number + 1), 1000 * (number + 1) + whole + 1)))
    assert spans_of(rig, PROMPT)[0] == (0, whole, "host")
    rig.cache.reset()
    assert spans_of(rig, PROMPT)[0] == (0, whole, Reason.FLUSHED.value)


def test_a_load_that_is_refused() -> None:
    rig, whole = Rig(), 8 * PAGE
    spans_of(rig, PROMPT)
    for number in range(NUM_TOKENS // whole):
        spans_of(rig, list(range(1000 * (number + 1), 1000 * (number + 1) + whole + 1)))
    gate: Any = rig.cache.inner.cache.no_regret
    gate.takes = lambda transfer, num_pages, *more: False
    assert spans_of(rig, PROMPT)[0] == (0, whole, Reason.PREDICTED_SLOWER.value)


def test_the_same_prompt_twice_in_one_batch() -> None:
    """The first has given its pages when the second is explained."""
    rig, whole = Rig(), 8 * PAGE
    first, second = rig.request(PROMPT), rig.request(PROMPT)
    rig.admit(first)
    rig.admit(second)
    rig.finish(first)
    rig.finish(second)
    assert rig.cache.explainer is not None
    told: Any = rig.cache.explainer.recent.one(second.rid)
    assert told["by_reason"] == {"under_way": whole, "boundary": 1}
    assert rig.cache.explainer.computed_tokens == {"never_seen": whole, "under_way": whole, "boundary": 2}


def test_tokens_whose_log_probabilities_are_asked_for_are_not_looked_up() -> None:
    rig, whole = Rig(), 8 * PAGE
    spans_of(rig, PROMPT)
    assert rig.cache.explainer is not None
    asked = rig.request(PROMPT)
    asked.return_logprob, asked.logprob_start_len = True, 3 * PAGE + 1
    rig.admit(asked)
    rig.finish(asked)
    told: Any = rig.cache.explainer.recent.one(asked.rid)["spans"]
    assert [(one["end"], one.get("reason")) for one in told] == [(3 * PAGE, None), (whole + 1, "boundary")]
    assert "log probabilities" in told[1]["detail"]


def test_a_load_that_was_refused_before_counts_no_more() -> None:
    """SGLang asked for it and did not admit the request; until it did, the host lost its pages."""
    rig, whole = Rig(), 8 * PAGE
    spans_of(rig, PROMPT)
    for number in range(NUM_TOKENS // whole):
        spans_of(rig, list(range(1000 * (number + 1), 1000 * (number + 1) + whole + 1)))
    gate: Any = rig.cache.inner.cache.no_regret
    takes, gate.takes = gate.takes, lambda transfer, num_pages, *more: False
    req = rig.request(PROMPT)
    found = rig.match(req)
    params = InitLoadBackParams(found.best_match_node, found.host_hit_length, None, req)
    assert rig.cache.init_load_back(params)[0] == 0
    gate.takes = takes
    rig.cache.reset()
    rig.admit(req)
    rig.finish(req)
    assert rig.cache.explainer is not None
    told: Any = rig.cache.explainer.recent.one(req.rid)
    assert told["by_reason"] == {Reason.FLUSHED.value: whole, "boundary": 1}
