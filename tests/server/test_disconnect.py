"""A client that goes away ends its request in the engine, at whatever moment it leaves; over real sockets."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import httpx
import pytest

from hiradix.apps.engine.api import EngineBusy, RequestError
from tests.server.live import DEADLINE_S, running
from tests.server.scripted import ScriptedService, application, piece


async def seen(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), DEADLINE_S)


def played(story: Callable[[ScriptedService, str], Awaitable[None]], service: ScriptedService) -> None:
    async def play() -> None:
        async with running(application(service)) as url:
            await story(service, url)

    asyncio.run(play())


class SilentService(ScriptedService):
    """Takes a request and never answers it until it is aborted."""

    async def generate(self, generation):  # type: ignore[no-untyped-def, override]
        self.requests.append(generation)
        self.asked.set()
        await self.stopped.wait()
        yield piece("", "abort")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "kind", [SilentService, lambda: ScriptedService(hold=True)], ids=["waiting", "decoding"]
)
def test_client_that_leaves_is_aborted(kind: Callable[[], ScriptedService], stream: bool) -> None:
    async def story(service: ScriptedService, url: str) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            body = {"prompt": "a", "stream": stream}
            task = asyncio.create_task(http.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S))
            await seen(service.asked)
            task.cancel()
            await seen(service.stopped)
            metrics = (await http.get(f"{url}/metrics", timeout=DEADLINE_S)).text
        begun = [line for line in metrics.splitlines() if line.startswith("sglang:prompt_tokens_total{")]
        assert begun == ([] if isinstance(service, SilentService) else [begun[0]])
        assert all(line.endswith(" 50.0") for line in begun), "what was computed for him counts"
        assert service.aborted == [service.requests[0].rid]
        ended = [line for line in metrics.splitlines() if line.startswith("sglang:num_requests_total{")]
        assert len(ended) == 1 and 'finish_reason="client_gone"' in ended[0] and ended[0].endswith(" 1.0")

    played(story, kind())


def test_client_that_leaves_in_mid_stream_is_aborted() -> None:
    async def story(service: ScriptedService, url: str) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            body = {"prompt": "a", "stream": True}
            async with http.stream("POST", f"{url}/v1/completions", json=body, timeout=DEADLINE_S) as reply:
                first = await anext(reply.aiter_lines())
                assert "Hel" in first
        await seen(service.stopped)
        assert service.aborted == [service.requests[0].rid]

    played(story, ScriptedService(hold=True))


class LateRefusal(SilentService):
    """Refuses a request at the moment when its client leaves."""

    async def generate(self, generation):  # type: ignore[no-untyped-def, override]
        try:
            async for output in super().generate(generation):
                yield output
        except asyncio.CancelledError:
            raise EngineBusy("the queue is full") from None


def test_a_refusal_that_nobody_waits_for_is_no_error_of_ours() -> None:
    """A traceback in the log: Task exception was never retrieved."""
    logged: list[object] = []

    async def story(service: ScriptedService, url: str) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        async with httpx.AsyncClient(trust_env=False) as http:
            body = {"prompt": "a"}
            task = asyncio.create_task(http.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S))
            await seen(service.asked)
            task.cancel()
            await seen(service.stopped)
        gc.collect()

    played(story, LateRefusal())
    gc.collect()
    assert logged == []


class OneOfAName(ScriptedService):
    """Refuses, as the engine does, a request under a name that one has which is being served."""

    async def generate(self, generation):  # type: ignore[no-untyped-def, override]
        if generation.rid in [one.rid for one in self.requests]:
            raise RequestError(f"a request with id {generation.rid!r} is being served already")
        async for output in super().generate(generation):
            yield output


def test_a_client_that_takes_anothers_name_ends_none_of_his_answers() -> None:
    async def story(service: ScriptedService, url: str) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:

            async def post(**fields: object) -> httpx.Response:
                body = {"prompt": "a", **fields}
                return await http.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S)

            his = asyncio.create_task(post(request_id="x", n=2))
            while len(service.requests) < 2:
                await asyncio.wait_for(asyncio.sleep(0.01), DEADLINE_S)
            for fields in ({"request_id": "x", "n": 2}, {"request_id": "x-1"}, {"rid": "x"}):
                reply = await post(**fields)
                assert reply.status_code == 400 and reply.json()["error"]["param"] == "request_id", reply.text
            assert service.aborted == [] and not his.done()
            service.stopped.set()
            assert (await his).status_code == 200

    played(story, OneOfAName(hold=True))


def test_client_that_stays_is_not_aborted() -> None:
    async def story(service: ScriptedService, url: str) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            for stream in (False, True):
                body = {"prompt": "a", "stream": stream}
                reply = await http.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S)
                assert reply.status_code == 200
            metrics = (await http.get(f"{url}/metrics", timeout=DEADLINE_S)).text
        assert service.aborted == [] and "client_gone" not in metrics

    played(story, ScriptedService())


def test_many_clients_at_once_get_their_own_answers() -> None:
    async def story(service: ScriptedService, url: str) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as http:
            bodies = [{"prompt": "a", "stream": bool(i % 2)} for i in range(40)]
            replies = await asyncio.gather(*(http.post(f"{url}/v1/completions", json=b) for b in bodies))
        assert all(reply.status_code == 200 for reply in replies)
        assert len({request.rid for request in service.requests}) == 40

    played(story, ScriptedService())
