"""The client: what it sends, how it reads a stream, how many requests it keeps in flight."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from hiradix.apps.bench.client import (
    Answer,
    BenchError,
    ChatServer,
    Conversation,
    LoadSettings,
    Message,
    Phase,
    Play,
    Sources,
    in_order,
    play_phase,
    replay,
    sources_of,
)
from tests.bench.fake_server import Body, Reply, fake_server

CONVERSATIONS = tuple(Conversation(f"c{i}", f"system {i}", ("one", "two", "three")) for i in range(6))
NAMES = tuple(c.name for c in CONVERSATIONS)


def ask_once(answer: Callable[[Body], Reply], limits: LoadSettings | None = None) -> Answer:
    async def run(url: str) -> Answer:
        async with ChatServer(url, limits or LoadSettings()) as server:
            return await server.ask(Play(CONVERSATIONS, 7).next_request("c0"))

    with fake_server(answer) as (url, _):
        return asyncio.run(run(url))


def test_one_answer_has_text_tokens_sources_and_times() -> None:
    answer = ask_once(lambda body: Reply(("Hel", "lo"), prompt_tokens=100, cached=(10, 20, 30)))
    assert answer.text == "Hello"
    assert [t.token for t in answer.tokens] == [b"Hel", b"lo"]
    assert answer.tokens[0].top == ((b"Hel", -0.5), (b"zz", -3.5))
    assert answer.sources == Sources(device=10, host=20, storage=30, computed=40)
    assert answer.sources.reused == 60
    assert 0 < answer.ttft_s <= answer.total_s


def test_a_stream_s_lines_end_only_where_its_bytes_do() -> None:
    """Found on SGLang, which sends as they are what Unicode, too, ends lines at."""
    answer = ask_once(lambda body: Reply(("a\u2028", "b\x85", "c")))
    assert answer.text == "a\u2028b\x85c"


def test_the_request_is_greedy_streamed_and_asks_for_usage() -> None:
    with fake_server(lambda body: Reply(("x",))) as (url, seen):

        async def run() -> None:
            async with ChatServer(url, LoadSettings(top_logprobs=0), model=None) as server:
                await server.ask(Play(CONVERSATIONS, 7).next_request("c1"))

        asyncio.run(run())
    body = seen.bodies[0]
    assert body["model"] == "fake" and body["temperature"] == 0 and body["max_tokens"] == 7
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert "logprobs" not in body
    assert body["messages"] == [
        {"role": "system", "content": "system 1"},
        {"role": "user", "content": "one"},
    ]


@pytest.mark.parametrize(
    ("reply", "what"),
    [
        (Reply(("x",), finish=False), "ended before"),
        (Reply(("x",), usage=False), "no usage"),
        (Reply((), status=503), "HTTP 503"),
    ],
)
def test_a_broken_answer_is_an_error_that_names_the_request(reply: Reply, what: str) -> None:
    with pytest.raises(BenchError, match=what) as error:
        ask_once(lambda body: reply)
    assert "c0#1" in str(error.value)


def test_a_server_that_is_not_there_is_an_error() -> None:
    async def run() -> None:
        async with ChatServer("http://127.0.0.1:9", LoadSettings()):
            pass

    with pytest.raises(BenchError, match="/v1/models"):
        asyncio.run(run())


def test_turns_build_on_the_answers_and_replay_sends_the_same() -> None:
    turns = [Phase("first", NAMES), Phase("again", NAMES[::-1])]

    async def run(url: str) -> tuple[list[Answer], list[Answer]]:
        play = Play(CONVERSATIONS, 4)
        async with ChatServer(url, LoadSettings()) as server:
            played = [a for phase in turns for a in await play_phase(server, play, phase, lambda a: None)]
            return played, await replay(server, [a.request for a in played], lambda a: None)

    with fake_server(lambda body: Reply((f"re {body['messages'][0]['content'][-1]}",))) as (url, _):
        played, replayed = asyncio.run(run(url))
    assert [a.request.label for a in played] == [f"{n}#1" for n in NAMES] + [f"{n}#2" for n in NAMES[::-1]]
    assert [a.request for a in replayed] == [a.request for a in played]
    last = played[-1].request.messages
    assert last == (
        Message("system", "system 0"),
        Message("user", "one"),
        Message("assistant", "re 0"),
        Message("user", "two"),
    )


def test_the_number_in_flight_is_reached_and_never_passed() -> None:
    meet = threading.Barrier(3)

    def answer(body: Body) -> Reply:
        meet.wait(30)  # returns only when three requests are here at once
        return Reply(("x",))

    async def run(url: str) -> None:
        async with ChatServer(url, LoadSettings(concurrency=3)) as server:
            await play_phase(server, Play(CONVERSATIONS, 4), Phase("p", NAMES), lambda a: None)

    with fake_server(answer) as (url, seen):
        asyncio.run(run(url))
    assert seen.most_running == 3


def test_the_first_failure_ends_the_rest() -> None:
    started: list[int] = []

    async def work(item: int) -> int:
        started.append(item)
        if item == 1:
            raise BenchError("one")
        await asyncio.Event().wait()
        return item

    with pytest.raises(BenchError, match="one"):
        asyncio.run(in_order(range(10), 2, work))
    assert started == [0, 1]


def test_results_keep_the_order_of_the_items() -> None:
    async def run() -> list[int]:
        gates = [asyncio.Event() for _ in range(4)]
        gates[3].set()

        async def work(item: int) -> int:
            await gates[item].wait()
            if item:
                gates[item - 1].set()
            return item * 10

        return await in_order(range(4), 4, work)

    assert asyncio.run(run()) == [0, 10, 20, 30]


def test_sources_without_the_breakdown_are_unspecified() -> None:
    plain = {"prompt_tokens": 50, "prompt_tokens_details": {"cached_tokens": 32}}
    assert sources_of(plain) == Sources(computed=18, unspecified=32)
    assert sources_of({"prompt_tokens": 50}) == Sources(computed=50)
    null = {"prompt_tokens": 50, "prompt_tokens_details": None, "cached_tokens_details": None}
    assert sources_of(null) == Sources(computed=50)


def test_a_phase_visits_a_conversation_once() -> None:
    with pytest.raises(AssertionError, match="twice"):
        Phase("bad", ("a", "b", "a"))
