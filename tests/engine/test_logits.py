"""What a request changes in its logits: beside transformers' processors, and a plain reference of the order."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hiradix.apps.engine import RequestError, SamplingParams, ranks
from hiradix.apps.engine.logits import LogitsProcessor, changes_logits
from hiradix.apps.engine.sampler import Draw, sample, score
from hiradix.config import HiCacheConfig
from hiradix.prefix_cache import build_prefix_cache
from tests.engine.checkpoints import VOCAB, Reference, prompts
from tests.engine.conftest import MakeEngine
from tests.engine.driving import assert_empty, serve, tokens

PAGES = HiCacheConfig(page_size=16)
ALL = SamplingParams(
    max_new_tokens=24, temperature=1.3, top_p=0.9, top_k=40, min_p=0.02, seed=11, repetition_penalty=1.3,
    presence_penalty=0.4, frequency_penalty=-0.3, logit_bias=((7, 3.0), (9, -100.0)), min_new_tokens=5,
)  # fmt: skip


def changed(
    params: SamplingParams, logits: torch.Tensor, prompt: list[int], answer: list[int]
) -> torch.Tensor:
    """`logits` as they are after `answer` was drawn."""
    processor = LogitsProcessor(params, prompt, {0}, None)
    for token in answer:
        processor.apply(logits)
        processor.accept(token)
    return processor.apply(logits)


def reference(params: SamplingParams, logits: torch.Tensor, prompt: list[int], answer: list[int]) -> Any:
    """The same in numpy, token by token, as the docstring of SamplingParams says it."""
    out = logits.numpy().astype(np.float64)
    for token, bias in params.logit_bias:
        out[token] += bias
    for token in range(len(out)):
        count = answer.count(token)
        if token in prompt or count:
            factor = params.repetition_penalty
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        out[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if len(answer) < params.min_new_tokens:
        out[0] = -np.inf
    return out


@pytest.mark.parametrize("seed", range(8))
def test_changes_are_those_of_a_plain_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, 60).astype(np.float32))
    params = SamplingParams(
        repetition_penalty=float(rng.choice([1.0, 0.7, 1.8])),
        presence_penalty=float(rng.choice([0.0, 1.5, -2.0])),
        frequency_penalty=float(rng.choice([0.0, 0.5, -0.25])),
        logit_bias=tuple(
            (int(token), float(rng.uniform(-9, 9))) for token in rng.choice(60, 5, replace=False)
        ),
        min_new_tokens=int(rng.choice([0, 3, 12])),
    )
    prompt, answer = rng.integers(0, 60, 20).tolist(), rng.integers(0, 60, 8).tolist()
    before = logits.clone()
    found = changed(params, logits, prompt, answer)
    np.testing.assert_allclose(found.numpy(), reference(params, logits, prompt, answer), rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before), "the row is the model's, whose log probabilities are told"


def test_processors_are_those_of_transformers() -> None:
    torch.manual_seed(1)
    logits, prompt, answer = torch.randn(VOCAB) * 4, [5, 6, 7, 5], [9, 5]
    ids = torch.tensor([[*prompt, *answer]])
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.4)(ids, logits[None].clone())[0]
    assert torch.allclose(changed(SamplingParams(repetition_penalty=1.4), logits, prompt, answer), theirs)
    bias = transformers.SequenceBiasLogitsProcessor([[[3], 2.5], [[8], -4.0]])
    ours = changed(SamplingParams(logit_bias=((3, 2.5), (8, -4.0))), logits, prompt, answer)
    assert torch.allclose(ours, bias(ids, logits[None].clone())[0])
    least = transformers.MinNewTokensLengthLogitsProcessor(len(prompt), 3, [0])
    ours = changed(SamplingParams(min_new_tokens=3), logits, prompt, answer)
    assert torch.equal(ours, least(ids, logits[None].clone())[0])


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        (SamplingParams(temperature=1.0, top_k=7), transformers.TopKLogitsWarper(7)),
        (SamplingParams(temperature=1.0, min_p=0.1), transformers.MinPLogitsWarper(0.1)),
        (SamplingParams(temperature=1.0, top_p=0.6), transformers.TopPLogitsWarper(0.6)),
    ],
    ids=["top_k", "min_p", "top_p"],
)
def test_what_may_be_drawn_is_what_transformers_lets_through(params: SamplingParams, warper: Any) -> None:
    torch.manual_seed(2)
    logits, generator = torch.randn(40) * 2, torch.Generator().manual_seed(1)
    kept = torch.softmax(warper(None, logits[None].clone())[0], 0)
    drawn = torch.tensor([sample(logits[None], [Draw(params, generator)])[0].token_id for _ in range(6000)])
    seen = torch.bincount(drawn, minlength=40) / len(drawn)
    assert set(drawn.tolist()) <= set(kept.nonzero()[:, 0].tolist())
    assert (seen - kept).abs().max() < 0.03  # over four standard deviations


def test_top_p_is_of_what_top_k_has_left() -> None:
    logits, generator = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1])), torch.Generator().manual_seed(1)
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.5)
    draw = Draw(params, generator)
    assert {sample(logits[None], [draw])[0].token_id for _ in range(200)} == {0}, "0.4 of 0.7 is over half"
    draw = Draw(replace(params, top_k=0), generator)
    assert {sample(logits[None], [draw])[0].token_id for _ in range(200)} == {0, 1}


def test_neutral_values_have_no_processor_and_no_cost() -> None:
    assert not changes_logits(SamplingParams(top_k=0, min_p=0.0, temperature=1.0, seed=1))
    logits = torch.randn(4, VOCAB)
    plain = [Draw(SamplingParams(), None)] * 4
    assert [e.token_id for e in sample(logits, plain)] == logits.argmax(-1).tolist()


def test_logprobs_are_of_the_model_and_not_of_what_was_made_of_it() -> None:
    logits = torch.tensor([1.0, 2.0, 0.0])
    params = SamplingParams(logit_bias=((2, 50.0),), logprobs=1)
    [drawn] = sample(logits[None], [Draw(params, None, LogitsProcessor(params, [0], (), None))])
    assert drawn.token_id == 2 and drawn.top[0][0] == 1
    assert drawn.logprob == pytest.approx(float(torch.log_softmax(logits, 0)[2]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": -1}, {"min_p": 1.5}, {"repetition_penalty": 0.0}, {"presence_penalty": 2.5},
        {"frequency_penalty": float("nan")}, {"logit_bias": ((1, 101.0),)}, {"min_new_tokens": 500},
        {"prompt_logprobs": 51},
    ],
)  # fmt: skip
def test_bad_values_name_their_field(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(RequestError, match="^min_tokens=" if name == "min_new_tokens" else f"^{name}="):
        SamplingParams(**wrong)


def test_ids_outside_of_the_vocabulary_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES)
    for params in (SamplingParams(logit_bias=((VOCAB, 1.0),)), SamplingParams(stop_token_ids=(-1,))):
        with pytest.raises(RequestError, match="token ids outside"):
            engine.add_request("r", [5, 6], params)


def test_answers_behind_a_hit_are_those_of_a_cold_prompt_whatever_is_sampled(make_engine: MakeEngine) -> None:
    asked = prompts([50, 37, 50], seed=3)
    expected = tokens(serve(make_engine(cache=PAGES), asked, ALL))
    engine = make_engine(cache=PAGES, build_cache=build_prefix_cache)
    assert tokens(serve(engine, asked, ALL)) == expected
    again = serve(engine, asked, ALL)
    assert tokens(again) == expected
    assert all(answer.usage is not None and answer.usage.cached_tokens > 0 for answer in again)
    tight = make_engine(cache=PAGES, build_cache=build_prefix_cache, max_total_tokens=208)
    assert tokens(serve(tight, asked, ALL)) == expected and tight.info().num_retractions > 0
    assert_empty(engine)


def test_nothing_ends_an_answer_before_min_tokens(llama: Reference, make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES)
    [prompt] = prompts([20], seed=4)
    [free] = serve(engine, [prompt], SamplingParams(max_new_tokens=12))
    ends = SamplingParams(max_new_tokens=12, stop_token_ids=(free.token_ids[2],))
    [stopped] = serve(engine, [prompt], ends)
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[2]) + 1]
    [longer] = serve(engine, [prompt], replace(ends, min_new_tokens=6))
    assert len(longer.token_ids) > 6 and free.token_ids[2] not in longer.token_ids[:6]


@pytest.mark.parametrize("chunk", [16, 512])
def test_prompt_logprobs_are_those_of_the_model_behind_a_hit_too(
    llama: Reference, make_engine: MakeEngine, chunk: int
) -> None:
    engine = make_engine(cache=PAGES, build_cache=build_prefix_cache, chunked_prefill_size=chunk)
    [prompt] = prompts([70], seed=5)
    params = SamplingParams(max_new_tokens=4, prompt_logprobs=3)
    for _ in range(2):
        engine.add_request("r", prompt, params)
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        found = outputs[0].prompt_logprobs
        assert not any(output.prompt_logprobs for output in outputs[1:])
        assert outputs[0].usage.cached_tokens == 0
        assert [entry.token_id for entry in found] == prompt[1:]
        for at in (0, 1, 16, 40, 68):
            expected = llama.logprobs_after(prompt[: at + 1])
            values, ids = expected.topk(3)
            assert found[at].logprob == pytest.approx(float(expected[prompt[at + 1]]), abs=2e-4)
            assert [token for token, _ in found[at].top] == ids.tolist()
            assert found[at].rank == int((expected > expected[prompt[at + 1]]).sum()) + 1
    [plain] = serve(engine, [prompt], SamplingParams(max_new_tokens=4))
    assert plain.token_ids == [token for output in outputs for token in output.token_ids]
    assert plain.usage is not None and plain.usage.cached_tokens == 64
    assert_empty(engine)


def test_prompt_logprobs_are_all_there_after_a_retraction(make_engine: MakeEngine) -> None:
    asked = prompts([60, 50, 55], seed=6)
    params = SamplingParams(max_new_tokens=40, prompt_logprobs=0)
    tight = make_engine(
        cache=PAGES, build_cache=build_prefix_cache, max_total_tokens=208, chunked_prefill_size=16
    )
    found: dict[str, list[int]] = {}
    for number, prompt in enumerate(asked):
        tight.add_request(f"r{number}", prompt, params)
    while tight.has_work:
        for output in tight.step():
            found.setdefault(output.rid, []).extend(entry.token_id for entry in output.prompt_logprobs)
    assert [found[f"r{number}"] for number in range(3)] == [prompt[1:] for prompt in asked]
    assert tight.info().num_retractions > 0


def test_scores_of_many_rows_are_those_of_each() -> None:
    torch.manual_seed(3)
    logits = torch.randn(130, 50)
    ids = torch.randint(0, 50, (130,)).tolist()
    found = score(logits, ids, 2)
    for row, entry in enumerate(found):
        expected = torch.log_softmax(logits[row], 0)
        assert entry.logprob == pytest.approx(float(expected[ids[row]]), abs=1e-5)
        assert [value for _, value in entry.top] == pytest.approx(expected.topk(2).values.tolist(), abs=1e-5)


def test_other_ranks_are_told_the_same() -> None:
    params = replace(ALL, stop=("a",), stop_token_ids=(3,), tool_markers=("<call>",), grammar="start: x")
    assert ranks._params(json.loads(json.dumps(asdict(params)))) == params
