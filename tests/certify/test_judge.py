"""When two answers are the same: by how far the expected token is ahead, and how far log probabilities moved."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hiradix.apps.certify.client import Reply, Token, cached_tokens
from hiradix.apps.certify.judge import Judge, Likeness, Noise, compared, measured
from hiradix.apps.certify.prompts import Prompt, Writer

TOP = {"a": -0.1, "b": -2.6, "c": -4.0}


def token(name: str, logprob: float | None = None, top: Mapping[str, float] = TOP) -> Token:
    return Token(name, top[name] if logprob is None else logprob, top)


def reply(*tokens: Token, text: str | None = None) -> Reply:
    said = "".join(t.name for t in tokens) if text is None else text
    return Reply(Prompt("p", ("p",)), "/", {}, said, tokens, "length", 1, 0, None, 0.1)


def judge(noise: float = 0.0) -> Judge:
    return Judge(Noise(noise, 100, 10, 0))


def test_equal_tokens_with_equal_logprobs_are_equal() -> None:
    assert judge().compare(reply(token("a")), reply(token("a"))).kind is Likeness.EQUAL


@pytest.mark.parametrize(
    ("noise", "kind"), [(0.0, Likeness.WRONG), (0.4, Likeness.WRONG), (0.6, Likeness.TIE)]
)
def test_another_token_is_wrong_if_the_noise_does_not_explain_it(noise: float, kind: Likeness) -> None:
    found = judge(noise).compare(reply(token("a"), token("a")), reply(token("a"), token("b")))
    assert found.kind is kind
    assert (found.at, found.expected, found.got, found.gap) == (1, "a", "b", pytest.approx(2.5))
    assert "token 1 is 'b' in place of 'a', which is ahead by at least 2.5" in found.sentence()


def test_what_is_not_among_the_likely_ones_is_behind_the_last_of_them() -> None:
    found = compared(reply(token("a")), reply(token("z", -0.1, {"z": -0.1, "a": -3.0})))
    assert found.gap == pytest.approx(3.9)


def test_an_answer_that_ends_early_is_behind_by_the_lead_over_the_second() -> None:
    found = judge(0.6).compare(reply(token("a"), token("a")), reply(token("a")))
    assert found.kind is Likeness.TIE and found.gap == pytest.approx(2.5) and "end of the answer" in found.got
    found = judge(0.4).compare(reply(token("a")), reply(token("a"), token("a")))
    assert found.kind is Likeness.WRONG and "end of the answer" in found.expected


def test_equal_tokens_whose_logprobs_move_are_a_drift() -> None:
    moved = reply(token("a"), token("a", -0.13))
    assert judge().compare(reply(token("a"), token("a")), moved).kind is Likeness.DRIFT
    assert judge(0.01).compare(reply(token("a"), token("a")), moved).kind is Likeness.EQUAL
    assert "token 1 ('a') moved by 0.03" in judge().compare(reply(token("a"), token("a")), moved).sentence()


def test_a_tie_behind_a_drift_is_wrong() -> None:
    near = {"a": -0.7, "b": -0.7}
    got = reply(token("a", -0.4), token("b", top=near))
    assert judge().compare(reply(token("a"), token("a", top=near)), got).kind is Likeness.WRONG
    assert judge(0.1).compare(reply(token("a"), token("a", top=near)), got).kind is Likeness.TIE


def test_without_logprobs_only_texts_are_compared() -> None:
    assert judge().compare(reply(text="abc"), reply(text="abc")).kind is Likeness.EQUAL
    found = judge().compare(reply(text="abc"), reply(text="abd"))
    assert (found.kind, found.at) == (Likeness.TEXT, 2)
    exact = Judge(Noise(num_answers=20))
    assert exact.is_more_than_chance(10, 12) and not exact.is_more_than_chance(1, 12)
    assert not Judge(Noise(num_answers=20, num_texts=10)).is_more_than_chance(8, 12)


def test_noise_is_the_most_that_cold_answers_differ_and_what_is_gross_is_none() -> None:
    groups = [
        [reply(token("a", -0.10)), reply(token("a", -0.12)), reply(token("a", -0.11))],
        [reply(token("a")), reply(token("c"))],
    ]
    noise, gross = measured(groups)
    assert noise.logprob == pytest.approx(0.02) and noise.num_answers == 3
    assert [difference.got for _, _, difference in gross] == ["c"]


def test_counters_of_known_servers_are_read_by_tier() -> None:
    vllm = (
        'vllm:prefix_cache_hits_total{engine="0"} 1.28e+02\n'
        'vllm:external_prefix_cache_hits_total{engine="0"} 64.0\n'
        'vllm:prefix_cache_queries_total{engine="0"} 999.0\n'
    )
    assert cached_tokens(vllm) == {"device": 128, "host": 64}
    sglang = "".join(
        f'sglang:cached_tokens_total{{cache_source="{tier}"}} {number}\n'
        for tier, number in [("device", 5.0), ("host", 6.0), ("storage", 0.0), ("total", 11.0)]
    )
    assert cached_tokens(sglang) == {"device": 5, "host": 6, "storage": 0}
    assert cached_tokens("process_open_fds 7.0\n") is None


def test_prompts_are_drawn_from_run_and_name_and_have_facts_to_ask_for() -> None:
    passage = Writer("r").passage("p", 300)
    assert passage == Writer("r").passage("p", 300) != Writer("s").passage("p", 300)
    assert len(passage.words) == 300 and len(passage.facts) >= 4
    _, who, number = passage.facts[0]
    prompt = passage.asked()
    assert prompt.truth == number and f"The number of {who} is {number} ." in prompt.text
    assert prompt.text.endswith(f"The number of {who} is")
    head = passage.cut(40)
    assert len(head.words) == 40 and all(at <= 40 for at, _, _ in head.facts)
    both = head.then(Writer("r").passage("tail", 60, is_start=False))
    at, who, number = both.facts[-1]
    assert at > 40 and " ".join(both.words[:at]).endswith(f"The number of {who} is {number} .")
