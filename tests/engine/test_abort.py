"""A request can be aborted in every state; nothing it held is lost, and others go on undisturbed."""

from __future__ import annotations

import pytest

from hiradix.apps.engine import Engine, EngineBusy, SamplingParams
from hiradix.config import HiCacheConfig
from tests.engine.checkpoints import Reference, prompts
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Answer, assert_empty, collect, drain

PAGES = HiCacheConfig(page_size=16)
GREEDY = SamplingParams(max_new_tokens=30)


def run_and_abort(engine: Engine, num_steps: int) -> dict[str, Answer]:
    """Two requests; the first is aborted after `num_steps` steps."""
    asked = prompts([90, 25], seed=3)
    answers: dict[str, Answer] = {}
    engine.add_request("gone", asked[0], GREEDY)
    engine.add_request("kept", asked[1], GREEDY)
    for _ in range(num_steps):
        collect(answers, engine.step())
    assert engine.abort("gone")
    assert not engine.abort("gone")
    for rid, answer in drain(engine).items():
        mine = answers.setdefault(rid, Answer())
        mine.token_ids += answer.token_ids
        mine.finish_reason, mine.usage = answer.finish_reason, answer.usage
    return answers


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 8])  # waiting; prefilling in chunks; decoding
def test_abort_leaves_nothing_behind(num_steps: int, llama: Reference, make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES, chunked_prefill_size=32, max_total_tokens=512)
    answers = run_and_abort(engine, num_steps)
    assert answers["gone"].finish_reason == "abort"
    assert answers["kept"].finish_reason == "length"
    asked = prompts([90, 25], seed=3)
    llama.judge([asked[1]], [answers["kept"].token_ids]).assert_holds()
    assert answers["gone"].token_ids == llama.answer(asked[0], 30)[: len(answers["gone"].token_ids)]
    assert_empty(engine)


def test_abort_of_a_retracted_request(make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES, max_total_tokens=160)
    for index, prompt in enumerate(prompts([20, 31, 18, 25, 40], seed=6)):
        engine.add_request(str(index), prompt, SamplingParams(max_new_tokens=60))
    while engine.info().num_retractions == 0:
        engine.step()
    for index in range(5):
        engine.abort(str(index))
    engine.step()
    assert not engine.has_work
    assert_empty(engine)


def test_abort_of_an_unknown_id_is_refused(make_engine: MakeEngine) -> None:
    assert not make_engine(cache=PAGES).abort("nobody")


def test_waiting_queue_has_a_cap(make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES, max_waiting_requests=2)
    engine.add_request("a", [1], GREEDY)
    engine.add_request("b", [1], GREEDY)
    with pytest.raises(EngineBusy):
        engine.add_request("c", [1], GREEDY)
    engine.step()
    engine.add_request("c", [1], GREEDY)
    assert len(drain(engine)) == 3


def test_flush_needs_an_idle_engine(make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES)
    engine.add_request("a", [1, 2], GREEDY)
    assert not engine.flush()
    drain(engine)
    assert engine.is_idle() and engine.flush()


def test_close_drops_open_requests(make_engine: MakeEngine) -> None:
    engine = make_engine(cache=PAGES)
    engine.add_request("a", [1, 2], GREEDY)
    engine.step()
    engine.add_request("b", [1, 2], GREEDY)
    engine.close()
    assert_empty(engine)
