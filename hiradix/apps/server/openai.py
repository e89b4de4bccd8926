"""POST /v1/completions and /v1/chat/completions, whole or streamed, and GET /v1/models."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from hiradix.apps.engine.api import EngineBusy, Output, RequestError, SamplingParams
from hiradix.apps.server.auth import caller_of
from hiradix.apps.server.bounded_executor import BoundedExecutor
from hiradix.apps.server.generation import ClientGone, Run, api_error, merged
from hiradix.apps.server.intake import CLIENT_CLOSED_REQUEST, Intake, read_body
from hiradix.apps.server.metrics import RequestMetrics
from hiradix.apps.server.render import (
    DONE,
    ChatRenderer,
    CompletionRenderer,
    Envelope,
    Renderer,
    event,
    usage_json,
)
from hiradix.apps.server.schema import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_NAME_CHARS,
    ApiError,
    ChatBody,
    CompletionBody,
    GenerationBody,
    MessageBody,
    Owner,
    SessionBody,
    session_of,
)
from hiradix.apps.server.service import Generation, Service, TokenizerLike
from hiradix.errors import Misuse

MANY_LOGPROBS = 1000
"""To show more of them, each a token to decode, is work beside the event loop."""
MAX_SHOWN = 4096
SHOW_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class _Job:
    """A checked request: what the engine runs and how the answer is shown. Its body is not kept."""

    generation: Generation
    renderer: Renderer
    envelope: Envelope
    prompt_field: str
    is_streamed: bool
    include_usage: bool


class OpenAI:
    """The OpenAI endpoints over one engine and one model name."""

    def __init__(self, service: Service, model_name: str, metrics: RequestMetrics, needs_salt: bool = False):
        self._needs_salt = needs_salt
        self._service = service
        self._model = model_name
        self._metrics = metrics
        self._intake = Intake()
        self._long_answers = BoundedExecutor("long answers to show", 1, MAX_SHOWN)
        self._started = int(time.time())
        self.router = APIRouter(prefix="/v1")
        self.router.add_api_route("/completions", self.completions, methods=["POST"])
        self.router.add_api_route("/chat/completions", self.chat, methods=["POST"])
        self.router.add_api_route("/end_of_session", self.end_of_session, methods=["POST"])
        self.router.add_api_route("/keep_alive", self.keep_alive, methods=["POST"])
        self.router.add_api_route("/models", self.models, methods=["GET"])
        self.router.add_api_route("/models/{name:path}", self.model, methods=["GET"])

    async def models(self) -> dict[str, Any]:
        """GET /v1/models: the one model this server has."""
        return {"object": "list", "data": [self._model_card()]}

    async def model(self, name: str) -> dict[str, Any]:
        """GET /v1/models/{name}."""
        self._check_model(name)
        return self._model_card()

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, await self._completion_job(request))

    async def _completion_job(self, request: Request) -> _Job:
        with self._intake.body() as share:
            body = await read_body(request, CompletionBody, share)
            self._check_model(body.model)
            prompt_ids = await self._prompt_ids(body.one_prompt(), self._service.context_length)
        params = self._params(body, body.max_tokens or DEFAULT_COMPLETION_TOKENS, body.logprobs)
        envelope = self._envelope("cmpl", body, body.logprobs is not None)
        generation = Generation(
            envelope.id, prompt_ids, params, body.scope(self._owner(request), session_of(request))
        )
        renderer = CompletionRenderer(envelope)
        return _Job(generation, renderer, envelope, "prompt", bool(body.stream), body.include_usage)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, await self._chat_job(request))

    async def _chat_job(self, request: Request) -> _Job:
        with self._intake.body() as share:
            body = await read_body(request, ChatBody, share)
            self._check_model(body.model)
            num_logprobs, limit = body.num_logprobs(), body.token_limit()
            prompt_ids = await self._chat_ids(body.messages, self._service.context_length)
        if limit is None:
            limit = max(1, self._service.context_length - len(prompt_ids))
        params = self._params(body, limit, num_logprobs)
        envelope = self._envelope("chatcmpl", body, num_logprobs is not None)
        generation = Generation(
            envelope.id, prompt_ids, params, body.scope(self._owner(request), session_of(request))
        )
        renderer = ChatRenderer(envelope)
        return _Job(generation, renderer, envelope, "messages", bool(body.stream), body.include_usage)

    async def end_of_session(self, request: Request) -> dict[str, Any]:
        """POST /v1/end_of_session: no more turns of this conversation will come."""
        return await self._hint(request, "end_of_session")

    async def keep_alive(self, request: Request) -> dict[str, Any]:
        """POST /v1/keep_alive: more turns of this conversation will come."""
        return await self._hint(request, "keep_alive")

    async def _hint(self, request: Request, hint: str) -> dict[str, Any]:
        with self._intake.body() as share:
            body = await read_body(request, SessionBody, share)
            self._check_model(body.model)
            owner = self._owner(request)
            scope = body.scope(hint, owner, session_of(request))
            if body.messages is not None:
                prompt_ids = await self._chat_ids(body.messages, None)
            else:
                if body.prompt is None:
                    raise Misuse("scope() lets one of messages and prompt through")
                prompt_ids = await self._prompt_ids(body.prompt, None)
        prompt_ids = prompt_ids[: self._service.context_length]  # what is behind was never served
        if not all(0 <= token < 1 << 31 for token in prompt_ids):
            raise ApiError("prompt: token ids must be in [0, 2**31)", param="prompt")
        num_cached = await self._service.hint(prompt_ids, scope)
        # Without a salt it would tell anyone what others have asked: this costs no run of the model.
        may_know = body.cache_salt or owner.tenant is not None or caller_of(request.scope).is_admin
        return {"object": hint, "cached_tokens": num_cached} if may_know else {"object": hint}

    def _owner(self, request: Request) -> Owner:
        """Whose request it is."""
        caller = caller_of(request.scope)
        return Owner(caller.tenant, self._needs_salt and not caller.is_admin)

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "hiradix",
            "root": self._model,
            "max_model_len": self._service.context_length,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model:
            message = f"model: {name[:MAX_NAME_CHARS]!r} does not exist, this server has {self._model!r}"
            raise ApiError(message, param="model", status=404, code="model_not_found")

    async def _prompt_ids(self, prompt: str | list[int], most: int | None) -> Sequence[int]:
        """Token ids of a prompt; `most`: the context, where one that does not fit is to be refused."""
        if isinstance(prompt, str):
            return await self._encode(lambda tokenizer: tokenizer.encode(prompt, most), "prompt", len(prompt))
        return prompt

    async def _chat_ids(self, messages: Sequence[MessageBody], most: int | None) -> Sequence[int]:
        plain = [message.plain() for message in messages]
        num_chars = sum(len(message["content"]) for message in plain)
        return await self._encode(lambda tokenizer: tokenizer.apply_chat(plain, most), "messages", num_chars)

    async def _encode(
        self, encode: Callable[[TokenizerLike], Sequence[int]], field: str, num_chars: int
    ) -> Sequence[int]:
        tokenizer: TokenizerLike | None = self._service.tokenizer
        if tokenizer is None:
            raise ApiError(
                f"{field}: this model has no tokenizer, send token ids to /v1/completions", param=field
            )
        try:
            return await self._intake.tokenise(partial(encode, tokenizer), num_chars)
        except (RequestError, EngineBusy) as error:
            raise api_error(error, field) from error

    def _params(self, body: GenerationBody, max_new_tokens: int, logprobs: int | None) -> SamplingParams:
        try:
            return body.sampling(max_new_tokens, logprobs)
        except RequestError as error:
            raise api_error(error, "body") from error

    def _envelope(self, prefix: str, body: GenerationBody, with_logprobs: bool) -> Envelope:
        tokenizer = self._service.tokenizer
        return Envelope(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._model,
            token_text=(lambda _: "") if tokenizer is None else tokenizer.token_text,
            with_logprobs=with_logprobs,
            with_token_ids=body.return_token_ids or tokenizer is None,
        )

    async def _answer(self, request: Request, job: _Job) -> Response:
        run = Run(self._service, job.generation, request, job.prompt_field)
        outputs = self._metrics.observed(run)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(run.aclose)
            try:
                if not job.is_streamed:
                    return await self._whole(outputs, job)
                first = await anext(outputs)
            except ClientGone:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            return EventStream(_events(first, outputs, job), stack.pop_all().aclose)
        raise AssertionError("the stack suppresses nothing")

    async def _whole(self, outputs: AsyncIterator[Output], job: _Job) -> Response:
        answer = merged([output async for output in outputs])
        if sum(1 + len(item.top) for item in answer.logprobs) <= MANY_LOGPROBS:
            return _response(answer, job)
        return await self._long_answers.run(partial(_response, answer, job), SHOW_TIMEOUT_S)


class EventStream(Response):
    """Server-sent events; `close` runs however the sending ends, also when it never began."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[None]]):
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._close()


def _response(answer: Output, job: _Job) -> Response:
    choices = [job.renderer.message(answer)]
    return JSONResponse(job.envelope.wrap(job.renderer.kind, choices, usage_json(answer.usage)))


async def _events(first: Output, rest: AsyncIterator[Output], job: _Job) -> AsyncIterator[bytes]:
    """The answer's events: opening, one per output with something to show, usage if asked for, [DONE]."""
    envelope, renderer, kind = job.envelope, job.renderer, job.renderer.chunk_kind
    if opening := renderer.opening():
        yield event(envelope.wrap(kind, opening, None))
    silent = not (envelope.with_logprobs or envelope.with_token_ids)
    output = first
    try:
        while True:
            if output.text or output.finish_reason or not silent:
                yield event(envelope.wrap(kind, [renderer.choice(output)], None))
            if output.finish_reason is not None:
                break
            output = await anext(rest)
    except ApiError as error:
        yield event(error.body())
    except ClientGone:
        return
    else:
        if job.include_usage:
            yield event(envelope.wrap(kind, [], usage_json(output.usage)))
    yield DONE
