"""The engine's greedy answers are those of transformers.generate, however the work is cut and batched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hiradix.apps.engine import EngineConfig, RequestError, SamplingParams, Scope
from hiradix.config import HiCacheConfig
from hiradix.errors import ConfigError
from tests.engine.checkpoints import CONTEXT, FAMILIES, VOCAB, Reference, prompts
from tests.engine.conftest import MakeEngine
from tests.engine.driving import assert_empty, drain, serve, tokens

LENGTHS = (1, 7, 15, 16, 17, 33, 70, 140)
PAGES = HiCacheConfig(page_size=16)
GREEDY = SamplingParams(max_new_tokens=20)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [None, 24])
def test_answers_equal_transformers(
    family: str, chunk: int | None, reference: Callable[[str], Reference], make_engine: MakeEngine
) -> None:
    judge = reference(family)
    engine = make_engine(
        model_path=str(judge.path), cache=PAGES, chunked_prefill_size=chunk, max_total_tokens=2048
    )
    asked = prompts(LENGTHS, seed=3)
    judge.judge(asked, tokens(serve(engine, asked, GREEDY))).assert_holds()
    assert_empty(engine)


@pytest.mark.parametrize(("page_size", "max_running"), [(16, 1), (16, 3), (1, 16), (64, 16)])
def test_batching_and_page_size_change_nothing(
    page_size: int, max_running: int, llama: Reference, make_engine: MakeEngine
) -> None:
    engine = make_engine(
        cache=HiCacheConfig(page_size=page_size),
        chunked_prefill_size=50,
        max_total_tokens=2048,
        max_running_requests=max_running,
    )
    asked = prompts(LENGTHS, seed=4)
    llama.judge(asked, tokens(serve(engine, asked, GREEDY))).assert_holds()
    assert_empty(engine)


def test_requests_join_and_leave_a_running_batch(llama: Reference, make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES, chunked_prefill_size=32, max_total_tokens=1024)
    asked = prompts([40, 3, 90, 12, 55, 28], seed=5)
    answers: dict[str, list[int]] = {}
    for index, prompt in enumerate(asked):
        engine.add_request(str(index), prompt, SamplingParams(max_new_tokens=6 + 3 * index))
        for _ in range(2):
            for output in engine.step():
                answers.setdefault(output.rid, []).extend(output.token_ids)
    for rid, answer in drain(engine).items():
        answers.setdefault(rid, []).extend(answer.token_ids)
    llama.judge(asked, [answers[str(i)] for i in range(len(asked))]).assert_holds()
    assert [len(answers[str(i)]) for i in range(len(asked))] == [6 + 3 * i for i in range(len(asked))]


@pytest.mark.parametrize("chunk", [None, 40])
def test_retraction_changes_no_answer(chunk: int | None, llama: Reference, make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES, max_total_tokens=160, chunked_prefill_size=chunk)
    asked = prompts([20, 31, 18, 25, 40], seed=6)
    answers = serve(engine, asked, SamplingParams(max_new_tokens=60))
    assert engine.info().num_retractions > 0
    llama.judge(asked, tokens(answers)).assert_holds()
    assert_empty(engine)


def test_finish_reasons(llama: Reference, make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES)
    [prompt] = prompts([30], seed=8)
    full = llama.answer(prompt, 12)
    stop = full[5]
    first = full.index(stop)
    [stopped] = serve(engine, [prompt], SamplingParams(max_new_tokens=12, stop_token_ids=(stop,)))
    assert (stopped.token_ids, stopped.finish_reason) == (full[: first + 1], "stop")
    [long] = serve(engine, [prompt], SamplingParams(max_new_tokens=12))
    assert (long.token_ids, long.finish_reason) == (full, "length")
    assert long.usage is not None and (long.usage.prompt_tokens, long.usage.completion_tokens) == (30, 12)


def test_answer_ends_with_the_context(llama: Reference, make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES, context_length=50, max_total_tokens=128)
    asked = prompts([49, 45], seed=9)
    answers = serve(engine, asked, SamplingParams(max_new_tokens=100))
    assert [len(answer.token_ids) for answer in answers] == [1, 5]
    assert {answer.finish_reason for answer in answers} == {"length"}
    llama.judge(asked, tokens(answers)).assert_holds()


def test_answer_ends_with_the_pool(llama: Reference, make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES, max_total_tokens=64)
    asked = prompts([64, 60, 3], seed=10)
    answers = serve(engine, asked, SamplingParams(max_new_tokens=100))
    assert [len(answer.token_ids) for answer in answers] == [1, 5, 62]
    llama.judge(asked, tokens(answers)).assert_holds()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1] * 64, "context length is 64"),
        ([1, VOCAB], "outside"),
        ([-1], "outside"),
    ],
)
def test_bad_prompt_is_refused(prompt: list[int], message: str, make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES, context_length=64)
    with pytest.raises(RequestError, match=message):
        engine.add_request("a", prompt, GREEDY)
    assert not engine.has_work


def test_prompt_larger_than_the_pool_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES, max_total_tokens=64)
    with pytest.raises(RequestError, match="device pool holds 64"):
        engine.add_request("a", [1] * 65, GREEDY)


def test_a_hint_that_says_nothing_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(RequestError, match="hint"):
        make_engine(cache=PAGES).hint([1, 2], Scope())


def test_id_in_use_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES)
    engine.add_request("a", [1], GREEDY)
    with pytest.raises(RequestError, match="'a'"):
        engine.add_request("a", [1], GREEDY)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": ("",)}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_bad_parameter_is_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)  # type: ignore[arg-type]


def test_bad_configuration_is_named(llama: Reference, make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        make_engine(model_path="nowhere")
    with pytest.raises(ConfigError, match="context_length"):
        make_engine(context_length=CONTEXT + 1)
    with pytest.raises(ConfigError, match="dtype"):
        EngineConfig(str(llama.path), dtype="int4")
    with pytest.raises(ConfigError, match="max_total_tokens"):
        make_engine(cache=PAGES, max_total_tokens=15)


def test_unsupported_model_type_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="gpt2"):
        make_engine(model_path=str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        make_engine(model_path=str(folder))


def test_missing_weights_are_refused(llama: Reference, make_engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama.path / "config.json").read_text())
    with pytest.raises(ConfigError, match="weights"):
        make_engine(model_path=str(tmp_path))
