"""One request through the engine: outputs in order, an end whatever happens, nothing left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from hiradix.apps.engine.api import FINISH_ERROR, EngineBusy, EngineStopped, Output, RequestError
from hiradix.apps.server.schema import ApiError
from hiradix.apps.server.service import Generation, Service


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


class Run:
    """The outputs of one generation, as an async iterator to be closed with `aclose`.

    Raises ApiError when the engine refuses or fails the request and ClientGone when the client disconnects.
    However it ends before the last output, the engine is told to abort the request.
    """

    def __init__(self, service: Service, generation: Generation, request: Request, prompt_field: str):
        self._service = service
        self._rid = generation.rid
        self._param = prompt_field
        self._outputs = service.generate(generation)
        self._gone = asyncio.create_task(_disconnected(request))
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

    async def aclose(self) -> None:
        """End the run; aborts it in the engine when it is not finished. Idempotent."""
        if not self._finished:
            self._finished = True
            self._service.abort(self._rid)
        self._gone.cancel()


def _let_go(step: asyncio.Future[Output]) -> None:
    """Retrieve the result of an abandoned step, so that its error is not reported as unhandled."""
    if not step.cancelled():
        step.exception()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def merged(outputs: list[Output]) -> Output:
    """All outputs of a request as if one step had produced them."""
    last = outputs[-1]
    values: dict[str, Any] = {
        "token_ids": tuple(token for output in outputs for token in output.token_ids),
        "logprobs": tuple(item for output in outputs for item in output.logprobs),
        "text": "".join(output.text for output in outputs),
    }
    return Output(
        rid=last.rid, usage=last.usage, finish_reason=last.finish_reason, error=last.error, **values
    )
