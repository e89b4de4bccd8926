"""One request through the engine: its answers in order, an end whatever happens, nothing left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.requests import Request

from hiradix.apps.engine.api import FINISH_ERROR, EngineBusy, EngineStopped, Output, RequestError
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.service import Generation, Service

Indexed = tuple[int, Output]
Observe = Callable[[AsyncIterator[Output]], AsyncIterator[Output]]


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


def api_error(error: Exception, param: str) -> ApiError:
    """The HTTP form of an engine's refusal; `param` is blamed unless the message names a field itself."""
    if isinstance(error, RequestError):
        name = str(error).partition("=")[0].partition(":")[0]
        if name.isidentifier():
            return ApiError(str(error), param=name)
        return ApiError(f"{param}: {error}", param=param)
    if isinstance(error, EngineBusy):
        return ApiError(str(error), status=503, code="queue_full")
    return ApiError(str(error), status=503, code="engine_stopped")


class _One:
    """The outputs of one generation, as an async iterator to be closed with `aclose`."""

    def __init__(self, service: Service, generation: Generation, gone: asyncio.Task[None], prompt_field: str):
        self._service = service
        self._rid = generation.rid
        self._param = prompt_field
        self._outputs = service.generate(generation)
        self._gone = gone
        self._finished = False

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        if self._finished:
            raise StopAsyncIteration
        output = await self._next()
        self._finished = output.finish_reason is not None
        if output.finish_reason == FINISH_ERROR:
            raise ApiError(output.error or "the engine failed this request", status=500, code="engine_error")
        return output

    async def _next(self) -> Output:
        step = asyncio.ensure_future(anext(self._outputs))
        try:
            await asyncio.wait({step, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if not step.done():
                raise ClientGone
            return step.result()
        except (RequestError, EngineBusy, EngineStopped) as error:
            self._finished = True
            raise api_error(error, self._param) from error
        except StopAsyncIteration:
            self._finished = True
            raise ApiError("the engine ended the answer early", status=500, code="engine_error") from None
        finally:
            if not step.done():
                step.add_done_callback(_let_go)
                step.cancel()

    def close(self) -> None:
        """Abort it in the engine when it is not finished. Idempotent."""
        if not self._finished:
            self._finished = True
            self._service.abort(self._rid)


class Run:
    """The outputs of a request's generations by their number, as an async iterator to be closed with `aclose`.

    Raises ApiError when the engine refuses or fails one of them and ClientGone when the client disconnects.
    However it ends, the engine is told to abort what has not ended. Of `num_answers` neighbours with one prompt
    the first begins alone, and the others once it has a token: then they find the prompt in the cache.
    """

    def __init__(
        self,
        service: Service,
        generations: Sequence[Generation],
        request: Request,
        prompt_field: str,
        observe: Observe,
        num_answers: int = 1,
    ):
        self._gone = asyncio.create_task(_disconnected(request))
        self._ones = [_One(service, generation, self._gone, prompt_field) for generation in generations]
        self._observe = observe
        self._num_answers = num_answers
        self._queue: asyncio.Queue[Indexed | Exception] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._left = len(self._ones)
        self._alone: AsyncIterator[Output] | None = None

    def __aiter__(self) -> AsyncIterator[Indexed]:
        return self

    async def __anext__(self) -> Indexed:
        if len(self._ones) == 1:
            self._alone = self._alone or self._observe(self._ones[0])
            return 0, await anext(self._alone)
        if not self._tasks:
            firsts = range(0, len(self._ones), self._num_answers)
            self._tasks = [asyncio.create_task(self._pump(index)) for index in firsts]
        if self._left == 0:
            raise StopAsyncIteration
        found = await self._queue.get()
        if isinstance(found, Exception):
            raise found
        self._left -= found[1].finish_reason is not None
        return found

    async def _pump(self, index: int) -> None:
        is_first = index % self._num_answers == 0
        try:
            async for output in self._observe(self._ones[index]):
                self._queue.put_nowait((index, output))
                if is_first:
                    is_first = False
                    others = range(index + 1, index + self._num_answers)
                    self._tasks += [asyncio.create_task(self._pump(other)) for other in others]
        except Exception as error:  # whoever reads the answers is told
            self._queue.put_nowait(error)

    async def aclose(self) -> None:
        """End the run. Idempotent."""
        for task in self._tasks:
            task.cancel()
        for one in self._ones:
            one.close()
        self._gone.cancel()


def _let_go(step: asyncio.Future[Output]) -> None:
    """Retrieve the result of an abandoned step, so that its error is not reported as unhandled."""
    if not step.cancelled():
        step.exception()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
