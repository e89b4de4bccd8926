"""EngineThread: streaming, commands between steps, aborts, deadlines, failure, and no spinning when idle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from hiradix.apps.engine import Engine, EngineStopped, EngineThread, Output, RequestError, SamplingParams
from hiradix.config import HiCacheConfig
from tests.engine.checkpoints import Reference, prompts
from tests.engine.conftest import MakeEngine
from tests.engine.driving import assert_empty

PAGES = HiCacheConfig(page_size=16)
WAIT_S = 60.0


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(cache=PAGES, max_total_tokens=1024)


@pytest.fixture
def served(engine: Engine) -> Iterator[EngineThread]:
    thread = EngineThread(engine)
    thread.start()
    yield thread
    thread.close(WAIT_S)


@pytest.fixture
def go_on(engine: Engine, served: EngineThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """With this, whoever has been told a token is under way until the event, however slow the test is.

    Between steps that do nothing the thread does what it is asked for.
    """
    step, event, told = engine.step, threading.Event(), False

    def held() -> list[Output]:
        nonlocal told
        if told and not event.wait(0.001):
            return []
        outputs = step()
        told = told or bool(outputs)
        return outputs

    monkeypatch.setattr(engine, "step", held)
    yield event
    event.set()


async def stream(served: EngineThread, rid: str, prompt: list[int]) -> list[Output]:
    return [output async for output in served.generate(rid, prompt, SamplingParams(max_new_tokens=12))]


def test_concurrent_streams(served: EngineThread, llama: Reference) -> None:
    asked = prompts([30, 9, 64, 17], seed=2)

    async def all_of_them() -> list[list[Output]]:
        return await asyncio.gather(*(stream(served, str(i), prompt) for i, prompt in enumerate(asked)))

    streams = asyncio.run(asyncio.wait_for(all_of_them(), WAIT_S))
    answers = [[token for output in outputs for token in output.token_ids] for outputs in streams]
    llama.judge(asked, answers).assert_holds()
    for outputs in streams:
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason == "length"


def test_leaving_a_stream_aborts_its_request(served: EngineThread, go_on: threading.Event) -> None:
    async def leave() -> None:
        outputs = served.generate("a", [1, 2, 3], SamplingParams(max_new_tokens=1000))
        assert (await anext(outputs)).token_ids
        await outputs.aclose()

    asyncio.run(asyncio.wait_for(leave(), WAIT_S))
    go_on.set()
    served.call(assert_empty, WAIT_S, when_idle=True)


def test_a_loop_that_is_closed_ends_its_requests(served: EngineThread) -> None:
    entered, leave, steps = threading.Event(), threading.Event(), []

    def block(engine: Engine) -> None:
        steps.append(engine.num_steps)
        entered.set()
        assert leave.wait(WAIT_S)

    loop = asyncio.new_event_loop()
    outputs = served.generate("a", [1, 2, 3], SamplingParams(max_new_tokens=1000))
    loop.run_until_complete(asyncio.wait_for(anext(outputs), WAIT_S))
    blocking = served.submit(block)
    assert entered.wait(WAIT_S)
    loop.close()  # with nobody to close the stream
    leave.set()
    blocking.result(WAIT_S)
    steps.append(served.call(lambda engine: engine.num_steps, WAIT_S, when_idle=True))
    assert steps[1] - steps[0] <= 2, steps
    served.call(assert_empty, WAIT_S)


def test_abort_ends_the_stream(served: EngineThread, go_on: threading.Event) -> None:
    async def run() -> Output:
        outputs = served.generate("a", [1, 2, 3], SamplingParams(max_new_tokens=1000))
        await anext(outputs)
        served.abort("a")
        go_on.set()
        return [output async for output in outputs][-1]

    assert asyncio.run(asyncio.wait_for(run(), WAIT_S)).finish_reason == "abort"


def test_refusals_reach_the_caller_and_hurt_nobody(
    served: EngineThread, llama: Reference, go_on: threading.Event
) -> None:
    async def run() -> list[Output]:
        first = served.generate("same", [5, 6], SamplingParams(max_new_tokens=30))
        outputs = [await anext(first)]
        with pytest.raises(RequestError, match="'same'"):
            await stream(served, "same", [1])
        with pytest.raises(RequestError, match="empty"):
            await stream(served, "b", [])
        go_on.set()
        return outputs + [output async for output in first]

    outputs = asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert [t for output in outputs for t in output.token_ids] == llama.answer([5, 6], 30)


def test_call_runs_on_the_engine_thread_and_raises_here(served: EngineThread) -> None:
    assert served.call(lambda engine: threading.current_thread().name, WAIT_S) == "hiradix-engine"
    with pytest.raises(ZeroDivisionError):
        served.call(lambda engine: 1 // 0, WAIT_S)
    assert served.call(lambda engine: engine.info(), WAIT_S).num_running == 0


def test_call_gives_up_at_its_deadline_and_is_not_run(served: EngineThread) -> None:
    entered, leave, ran = threading.Event(), threading.Event(), threading.Event()

    def block(engine: Engine) -> None:
        entered.set()
        assert leave.wait(WAIT_S)

    blocking = served.submit(block)
    assert entered.wait(WAIT_S)
    with pytest.raises(TimeoutError):
        served.call(lambda engine: ran.set(), 0.01)
    leave.set()
    blocking.result(WAIT_S)
    served.call(lambda engine: None, WAIT_S)
    assert not ran.is_set()


def test_when_idle_waits_for_the_requests(served: EngineThread) -> None:
    async def run() -> tuple[bool, int]:
        outputs = served.generate("a", [1, 2, 3], SamplingParams(max_new_tokens=200))
        await anext(outputs)
        flushed = asyncio.ensure_future(served.acall(lambda engine: engine.flush(), WAIT_S, when_idle=True))
        return await flushed, len([output async for output in outputs])

    flushed, num_outputs = asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert flushed and num_outputs == 199


def test_who_gave_up_waiting_for_an_idle_engine_takes_no_place(
    served: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiradix.apps.engine.async_engine.MAX_COMMANDS", 4)

    async def run() -> str | None:
        outputs = served.generate("a", [1, 2, 3], SamplingParams(max_new_tokens=1000))
        for _ in range(10):  # flushes that the traffic never lets through
            await anext(outputs)
            served.submit(lambda engine: engine.flush(), when_idle=True).cancel()
            await asyncio.wrap_future(served.submit(lambda engine: None))  # it has been looked at
        answer = await stream(served, "b", [1, 2])
        await outputs.aclose()
        return answer[-1].finish_reason

    assert asyncio.run(asyncio.wait_for(run(), WAIT_S)) == "length"


def test_idle_engine_does_not_spin(
    served: EngineThread, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []
    waiting = threading.Event()
    wait = engine.wait

    def counted(timeout_s: float) -> None:
        waits.append(timeout_s)
        if len(waits) > 1:
            waiting.set()
        wait(timeout_s)

    monkeypatch.setattr(engine, "wait", counted)
    served.call(lambda e: None, WAIT_S)
    assert waiting.wait(WAIT_S)
    assert set(waits) == {0.5}


def test_failure_reaches_everybody(
    served: EngineThread, engine: Engine, monkeypatch: pytest.MonkeyPatch, go_on: threading.Event
) -> None:
    def fail() -> list[Output]:
        raise MemoryError("no more")

    async def run() -> Output:
        outputs = served.generate("a", [1, 2, 3], SamplingParams(max_new_tokens=1000))
        await anext(outputs)
        monkeypatch.setattr(engine, "step", fail)
        return [output async for output in outputs][-1]

    last = asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert last.finish_reason == "error" and last.error is not None and "no more" in last.error
    with pytest.raises(EngineStopped):
        served.call(lambda e: None, WAIT_S)
    assert isinstance(served.failure, MemoryError) and not served.is_alive


def test_close_ends_streams_and_is_idempotent(served: EngineThread, go_on: threading.Event) -> None:
    async def run() -> Output:
        outputs = served.generate("a", [1, 2, 3], SamplingParams(max_new_tokens=1500))
        await anext(outputs)
        served.close(WAIT_S)
        return [output async for output in outputs][-1]

    assert asyncio.run(asyncio.wait_for(run(), WAIT_S)).finish_reason == "error"
    served.close(WAIT_S)
    with pytest.raises(EngineStopped):
        asyncio.run(stream(served, "b", [1]))
