"""Bodies and texts come in within bounds: of bytes, of time, and of how long others wait for a long one."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from hiradix.apps.engine.api import EngineBusy
from hiradix.apps.server import intake as intake_module
from hiradix.apps.server.bounded_executor import BoundedExecutor
from hiradix.apps.server.intake import FREE_BYTES, LARGE_CHARS, Intake
from hiradix.apps.server.messages import MessageBody
from hiradix.apps.server.sampling import GenerationBody
from hiradix.apps.server.schema import MAX_STOP_CHARS
from tests.server.scripted import CharTokenizer, ScriptedService, application, piece

WAIT_S = 60.0


class Call:
    """One POST to the application, whose body comes when it is told to."""

    def __init__(self, app: Any, path: str = "/v1/completions"):
        self._chunks: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.taken = asyncio.Event()
        self.status, self.body, self.headers = 0, b"", dict[bytes, bytes]()
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        scope |= {"root_path": "", "raw_path": path.encode(), "http_version": "1.1", "scheme": "http"}
        self.task = asyncio.ensure_future(app(scope, self._receive, self._answer))

    async def _receive(self) -> dict[str, Any]:
        if self._chunks.empty():
            self.taken.set()  # all that was sent is read
        return await self._chunks.get()

    async def _answer(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        self.body += message.get("body", b"")

    async def send(self, data: bytes, *, more: bool = False) -> Call:
        self.taken.clear()
        self._chunks.put_nowait({"type": "http.request", "body": data, "more_body": more})
        if more:
            sent = asyncio.ensure_future(self.taken.wait())
            await asyncio.wait({sent, self.task}, return_when=asyncio.FIRST_COMPLETED)
            sent.cancel()
        return self

    async def ask(self, prompt: object) -> Call:
        return await self.send(json.dumps({"prompt": prompt}).encode())

    async def done(self) -> int:
        await self.task
        return self.status


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), WAIT_S))


def test_bodies_that_are_read_have_a_cap_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module.Intake.__init__, "__defaults__", (1000,))

    async def work() -> None:
        app = application(ScriptedService())
        first = await Call(app).send(b" " * (FREE_BYTES + 900), more=True)
        second = await Call(app).send(b" " * (FREE_BYTES + 200), more=True)
        assert await second.done() == 503 and b"too_many_bodies" in second.body
        assert second.headers[b"retry-after"] == b"1"
        assert await (await Call(app).ask("short")).done() == 200, "a short body waits for no long one"
        assert await (await first.ask("x")).done() == 200
        again = await Call(app).send(b" " * (FREE_BYTES + 900), more=True)
        assert await (await again.ask("x")).done() == 200, "what ended has given its bytes back"

    run(work)


def test_a_client_that_leaves_or_sends_nonsense_gives_its_bytes_back() -> None:
    intake = Intake(1000)
    with pytest.raises(ValueError, match="nonsense"), intake.body() as share:
        share.grown_to(FREE_BYTES + 1000)
        assert intake.num_bytes == 1000
        raise ValueError("nonsense")
    assert intake.num_bytes == 0


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_that_runs_or_waits_has_no_body_any_more(path: str, is_streamed: bool) -> None:
    """Its bytes were given back: of requests in the queue, each could hold as much as a body may have."""
    user = {"role": "user", "content": "x", "name": "y" * FREE_BYTES}
    asked = {"messages": [user]} if "chat" in path else {"prompt": "x"}
    others = set(threading.enumerate())

    async def work() -> None:
        service = ScriptedService(hold=True)
        call = await Call(application(service), path).send(
            json.dumps({**asked, "stream": is_streamed}).encode()
        )
        await service.asked.wait()
        for thread in set(threading.enumerate()) - others:
            thread.join(WAIT_S)  # who parsed the body may not yet have let go of it
        gc.collect()
        assert not [each for each in gc.get_objects() if issubclass(type(each), GenerationBody | MessageBody)]
        service.stopped.set()
        assert await call.done() == 200

    run(work)


@pytest.mark.parametrize("stop", ["x" * (MAX_STOP_CHARS + 1), ["x", "x" * (MAX_STOP_CHARS + 1)]])
def test_a_stop_string_which_is_kept_to_the_end_has_a_length(stop: object) -> None:
    async def work() -> None:
        service = ScriptedService()
        body = {"prompt": "x", "stop": stop}
        call = await Call(application(service)).send(json.dumps(body).encode())
        assert await call.done() == 400 and b"stop" in call.body and not service.requests
        body["stop"] = ["x" * MAX_STOP_CHARS] * 16
        call = await Call(application(service)).send(json.dumps(body).encode())
        assert await call.done() == 200

    run(work)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/keep_alive"])
def test_a_body_that_never_comes_is_given_up(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiradix.apps.server.intake.BODY_TIMEOUT_S", 0.01)

    async def work() -> None:
        call = await Call(application(ScriptedService()), path).send(b"{", more=True)
        assert await call.done() == 408 and b"did not come within" in call.body
        assert call.headers[b"connection"] == b"close"

    run(work)


class Held(CharTokenizer):
    """Long texts are tokenised when they may be."""

    def __init__(self) -> None:
        self.may, self.num_begun = threading.Event(), 0

    def encode(self, text: str, context_length: int | None = None) -> list[int]:
        assert context_length == 100
        if len(text) > LARGE_CHARS:
            self.num_begun += 1
            assert self.may.wait(WAIT_S)
            return [1]
        return super().encode(text)


def test_no_request_waits_for_long_texts_and_few_of_them_wait() -> None:
    async def work() -> None:
        service = ScriptedService()
        service.tokenizer = held = Held()
        app, long = application(service), "x" * (LARGE_CHARS + 1)
        calls = [await Call(app).ask(long) for _ in range(9)]
        done, _ = await asyncio.wait([call.task for call in calls], return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        [refused] = [call for call in calls if call.task in done]
        assert refused.status == 503 and b"queue_full" in refused.body
        for _ in range(10):
            assert await (await Call(app).ask("short")).done() == 200
        while held.num_begun == 0:
            await asyncio.sleep(0.001)
        assert held.num_begun == 1
        held.may.set()
        assert {await call.done() for call in calls if call is not refused} == {200}

    run(work)


def test_work_whose_caller_gave_up_keeps_its_place_until_it_ends() -> None:
    async def work() -> None:
        lane, may, begun = BoundedExecutor("work", 1, 2), threading.Event(), list[int]()

        def hang(number: int) -> int:
            begun.append(number)
            assert may.wait(WAIT_S)
            return number

        with pytest.raises(TimeoutError):
            await lane.run(lambda: hang(0), 0.01)
        with pytest.raises(TimeoutError):
            await lane.run(lambda: hang(1), 0.01)  # it never began: its place is free again
        waits = asyncio.ensure_future(lane.run(lambda: hang(2), WAIT_S))
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy):
            await lane.run(lambda: hang(3), WAIT_S)
        may.set()
        assert await waits == 2 and begun == [0, 2]

    run(work)


def test_work_that_gets_no_thread_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def work() -> None:
        lane = BoundedExecutor("work", 1, 2)
        with monkeypatch.context() as few:
            few.setattr(threading.Thread, "start", refuse)
            for _ in range(3):
                with pytest.raises(EngineBusy, match="new thread"):
                    await lane.run(lambda: 0, WAIT_S)
        assert await lane.run(lambda: 1, WAIT_S) == 1

    run(work)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_thousands_of_log_probabilities_are_rendered_beside_the_event_loop(path: str) -> None:
    """Each is a token to decode: a second of them held up all other requests, and /health."""

    def threads(num_pieces: int) -> set[int]:
        seen = set[int]()

        class Noting(CharTokenizer):
            def token_text(self, token_id: int) -> str:
                seen.add(threading.get_ident())
                return super().token_text(token_id)

        service = ScriptedService([*[piece("x")] * num_pieces, piece("", "stop")])
        service.tokenizer = Noting()
        logprobs = {"logprobs": 2} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 2}
        asked = (
            {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        )

        async def work() -> None:
            call = await Call(application(service), path).send(json.dumps({**asked, **logprobs}).encode())
            assert await call.done() == 200

        run(work)
        return seen

    assert threads(1) == {threading.get_ident()}
    assert len(threads(500) - {threading.get_ident()}) == 1 and threading.get_ident() not in threads(500)


def test_answers_of_many_log_probabilities_are_rendered_one_at_a_time() -> None:
    """A thread each took the interpreter from the event loop in turn: a hundred of them, half a second."""
    may, begun = threading.Event(), list[int]()

    class Held(CharTokenizer):
        def token_text(self, token_id: int) -> str:
            if threading.get_ident() not in begun:
                begun.append(threading.get_ident())
                assert may.wait(WAIT_S)
            return super().token_text(token_id)

    service = ScriptedService([*[piece("x")] * 500, piece("", "stop")])
    service.tokenizer = Held()
    asked = json.dumps({"prompt": "a", "logprobs": 2}).encode()

    async def work() -> None:
        app = application(service)
        long = [await Call(app).send(asked) for _ in range(3)]
        for _ in range(10):
            other = await Call(app).send(b'{"prompt": "a", "stream": true}')
            assert await other.done() == 200
        assert len(begun) <= 1, "one at a time"
        may.set()
        assert [await call.done() for call in long] == [200] * 3
        assert begun and threading.get_ident() not in begun

    run(work)
