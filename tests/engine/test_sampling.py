"""Sampling: seeds, top_p, temperature, log probabilities."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hiradix.apps.engine import SamplingParams
from hiradix.apps.engine.sampler import Draw, SeedSource, sample
from hiradix.config import HiCacheConfig
from tests.engine.checkpoints import VOCAB, Reference, prompts
from tests.engine.conftest import MakeEngine
from tests.engine.driving import serve, tokens

PAGES = HiCacheConfig(page_size=16)
WARM = SamplingParams(max_new_tokens=12, temperature=1.5, top_p=0.95, seed=11)


def draw_many(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    generator = SeedSource(0, torch.device("cpu")).generator(params)
    return [sample(logits[None], [Draw(params, generator)])[0].token_id for _ in range(count)]


def test_seed_repeats_whatever_runs_beside(make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES)
    asked = prompts([21, 9, 40], seed=1)
    [alone] = serve(engine, asked[:1], WARM)
    beside = serve(engine, asked, WARM)
    assert beside[0].token_ids == alone.token_ids
    [other] = serve(engine, asked[:1], replace(WARM, seed=12))
    assert other.token_ids != alone.token_ids


def test_engine_seed_repeats_a_run_but_not_a_request(make_engine: MakeEngine) -> None:
    asked = prompts([21], seed=1) * 3
    params = replace(WARM, seed=None)
    first = tokens(serve(make_engine(cache=PAGES, seed=5), asked, params))
    again = tokens(serve(make_engine(cache=PAGES, seed=5), asked, params))
    assert first == again
    assert len({tuple(answer) for answer in first}) == 3


def test_seed_repeats_across_retraction(make_engine: MakeEngine) -> None:
    asked = prompts([20, 31, 18, 25, 40], seed=6)
    params = replace(WARM, max_new_tokens=50)
    roomy, tight = make_engine(cache=PAGES), make_engine(cache=PAGES, max_total_tokens=160)
    expected = tokens(serve(roomy, asked, params))
    assert tokens(serve(tight, asked, params)) == expected
    assert tight.info().num_retractions > 0


def test_top_p_keeps_the_smallest_set_of_that_mass() -> None:
    logits = torch.log(torch.tensor([0.05, 0.5, 0.15, 0.3]))
    params = SamplingParams(temperature=1.0, top_p=0.7, seed=1)
    assert set(draw_many(logits, params, 300)) == {1, 3}
    assert set(draw_many(logits, replace(params, top_p=0.5), 100)) == {1}
    assert set(draw_many(logits, replace(params, top_p=0.01), 100)) == {1}
    assert set(draw_many(logits, replace(params, top_p=1.0), 600)) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_distribution(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    expected = torch.softmax(logits / temperature, 0)
    drawn = draw_many(logits, SamplingParams(temperature=temperature, seed=3), 4000)
    seen = torch.bincount(torch.tensor(drawn), minlength=4) / len(drawn)
    assert (seen - expected).abs().max() < 0.03  # 4 standard deviations are 0.0316 at most


def test_logprobs_are_those_of_the_model(llama: Reference, make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES)
    [prompt] = prompts([30], seed=2)
    [answer] = serve(engine, [prompt], replace(WARM, logprobs=4, max_new_tokens=6))
    assert len(answer.logprobs) == len(answer.token_ids) == 6
    for at, entry in enumerate(answer.logprobs):
        expected = llama.logprobs_after([*prompt, *answer.token_ids[:at]])
        values, ids = expected.topk(4)
        assert entry.token_id == answer.token_ids[at]
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=2e-4)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(values.tolist(), abs=2e-4)


def test_logprobs_zero_is_the_chosen_token_only_and_none_is_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES)
    [chosen] = serve(engine, prompts([5]), SamplingParams(max_new_tokens=2, logprobs=0))
    assert [entry.top for entry in chosen.logprobs] == [(), ()]
    assert all(math.isfinite(entry.logprob) for entry in chosen.logprobs)
    [none] = serve(engine, prompts([5]), SamplingParams(max_new_tokens=2))
    assert none.logprobs == []


def test_greedy_takes_the_largest_logit() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 5] = logits[1, 0] = logits[2, VOCAB - 1] = 1.0
    draws = [Draw(SamplingParams(), None)] * 3
    assert [entry.token_id for entry in sample(logits, draws)] == [5, 0, VOCAB - 1]


@pytest.mark.parametrize("smallest", [1e-6, 1e-37, 1e-45, 5e-324])
def test_next_to_no_temperature_is_greedy_and_ends_no_engine(smallest: float) -> None:
    logits = torch.tensor([2.0, -30.0, 40.0, 39.0])
    params = SamplingParams(temperature=smallest, seed=1)
    assert set(draw_many(logits, params, 5)) == {2}
    assert set(draw_many(logits, replace(params, top_p=0.5), 5)) == {2}


@pytest.mark.parametrize("smallest", [1e-9, 1e-46, 5e-324])
def test_next_to_no_top_p_keeps_the_likeliest_token(smallest: float) -> None:
    logits = torch.tensor([2.0, -30.0, 5.0, 4.0])
    assert set(draw_many(logits, SamplingParams(temperature=1.0, top_p=smallest, seed=1), 5)) == {2}
