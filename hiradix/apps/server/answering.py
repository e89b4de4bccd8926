"""From a request of any dialect to its answer: tokens, grammar, the engine's outputs, whole or streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, count
from operator import ne
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Send
from starlette.types import Scope as ConnectionScope

from hiradix.apps.engine.api import (
    ChatPrompt,
    EngineBusy,
    PromptWish,
    RequestError,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from hiradix.apps.server.api_request import (
    MOST_ANSWERS,
    ApiRequest,
    AskedWish,
    Piece,
    PieceReader,
    Tally,
    ToolUse,
    WholeAnswer,
)
from hiradix.apps.server.auth import caller_of
from hiradix.apps.server.bounded_executor import BoundedExecutor
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.generation import ClientGone, Run, api_error
from hiradix.apps.server.intake import CLIENT_CLOSED_REQUEST, Intake
from hiradix.apps.server.metrics import RequestMetrics
from hiradix.apps.server.render import Json, Renderer
from hiradix.apps.server.schema import MAX_NAME_CHARS, Owner
from hiradix.apps.server.service import Generation, Service, TokenizerLike
from hiradix.apps.server.tools import FORMATS, ToolFormat, described, format_of

T = TypeVar("T")

MANY_LOGPROBS = 1000
"""To show more of them, each a token to decode, is work beside the event loop."""
MAX_SHOWN = 4096
SHOW_TIMEOUT_S = 600.0
MAX_GRAMMARS = 64
GRAMMAR_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class AnswerJob:
    """A checked request: what the engine runs and how the answer is shown. Its body is not kept."""

    generations: Sequence[Generation]
    renderer: Renderer
    field: str
    tools: ToolUse | None
    num_answers: int
    is_streamed: bool


class Answering:
    """The part that all dialects share: one engine, its model's names, and who may ask.

    names: the model's, the first is the one it is listed under first. tool_format: None: as the template says.
    """

    def __init__(
        self,
        service: Service,
        names: Sequence[str],
        metrics: RequestMetrics,
        needs_salt: bool = False,
        tool_parser: str | None = None,
    ):
        self.service = service
        self.names = tuple(names)
        self.intake = Intake()
        self.started = int(time.time())
        self._metrics = metrics
        self._needs_salt = needs_salt
        self._serving: set[str] = set()
        self._long_answers = BoundedExecutor("long answers to show", 1, MAX_SHOWN)
        self._forms = BoundedExecutor("forms of answers to read", 1, MAX_GRAMMARS)
        self._grammars = BoundedExecutor("grammars to compile", 1, MAX_GRAMMARS)
        template = "" if service.tokenizer is None else service.tokenizer.chat_template
        self._has_tools = "tools" in template
        form = format_of(template) if tool_parser is None else FORMATS[tool_parser]
        is_special = form.is_special or (form.begin != "" and service.special_token(form.begin) is not None)
        self.tool_format: ToolFormat = replace(form, is_special=is_special)

    # -- what a body says -------------------------------------------------------------------

    def check_model(self, name: str | None) -> str:
        """The model's name to answer with: as it was asked for. ApiError for another model's."""
        if name is not None and name not in self.names:
            message = f"model: {name[:MAX_NAME_CHARS]!r} does not exist, this server has {self.names[0]!r}"
            raise ApiError(message, param="model", status=404, code="model_not_found")
        return name or self.names[0]

    def owner(self, request: Request) -> Owner:
        """Whose request it is."""
        caller = caller_of(request.scope)
        return Owner(caller.tenant, self._needs_salt and not caller.is_admin)

    def token_text(self, token_id: int) -> str:
        """One token as text, "" without a tokenizer."""
        tokenizer = self.service.tokenizer
        return "" if tokenizer is None else tokenizer.token_text(token_id)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """A prompt as text, "" without a tokenizer."""
        tokenizer = self.service.tokenizer
        return "" if tokenizer is None else tokenizer.decode_all(token_ids)

    async def text_beside(self, token_ids: Sequence[int]) -> str:
        """The text of many tokens, decoded beside the event loop. ApiError without a tokenizer."""
        tokenizer = self.service.tokenizer
        if tokenizer is None:
            raise ApiError("tokens: this model has no tokenizer", param="tokens")
        try:
            return await self.show(partial(tokenizer.decode_all, token_ids), is_long=True)
        except (OverflowError, ValueError, TypeError, IndexError) as error:
            raise ApiError(f"tokens: {error}", param="tokens") from error

    async def show(self, make: Callable[[], T], is_long: bool) -> T:
        """Run `make`, which shows an answer, and return its result: a long one beside the event loop, one at a
        time."""
        return await self._long_answers.run(make, SHOW_TIMEOUT_S) if is_long else make()

    def conversation(self, messages: Sequence[Json], tools: Sequence[Json] = (), **more: Any) -> ChatPrompt:
        """The input of the chat template; tools are put into words if it has no place for them. ApiError."""
        if not self._has_tools and (tools or any(_is_of_tools(message) for message in messages)):
            messages, tools = described(messages, tools), ()
        try:
            return ChatPrompt(messages, tools, **more)
        except RequestError as error:
            raise api_error(error, "messages") from error

    # -- tokens -----------------------------------------------------------------------------

    async def token_ids(
        self,
        prompt: str | Sequence[int] | ChatPrompt,
        field: str,
        most: int | None,
        add_special_tokens: bool = True,
    ) -> Sequence[int]:
        """Token ids of a prompt; `most`: the context, where one that does not fit is to be refused."""
        if isinstance(prompt, ChatPrompt):
            num_chars = prompt.num_chars
            return await self._encode(lambda tokenizer: tokenizer.apply_chat(prompt, most), field, num_chars)
        if isinstance(prompt, str):
            special = {} if add_special_tokens else {"add_special_tokens": False}
            return await self._encode(
                lambda tokenizer: tokenizer.encode(prompt, most, **special), field, len(prompt)
            )
        return prompt

    async def _encode(
        self, encode: Callable[[TokenizerLike], Sequence[int]], field: str, num_chars: int
    ) -> Sequence[int]:
        tokenizer: TokenizerLike | None = self.service.tokenizer
        if tokenizer is None:
            raise ApiError(
                f"{field}: this model has no tokenizer, send token ids to /v1/completions", param=field
            )
        try:
            return await self.intake.tokenise(partial(encode, tokenizer), num_chars)
        except (RequestError, EngineBusy) as error:
            raise api_error(error, field) from error

    async def job(
        self, asked: ApiRequest, request_id: str, renderer: Callable[[Sequence[Generation]], Renderer]
    ) -> AnswerJob:
        """The request as it runs. Raises ApiError."""
        generations = await self._generations(asked, request_id)
        return AnswerJob(
            generations, renderer(generations), asked.field, asked.tools, asked.num_answers, asked.is_streamed
        )

    async def _generations(self, asked: ApiRequest, request_id: str) -> list[Generation]:
        """What the engine is asked: the prompts in order, each as often as it has answers."""
        context, params = self.service.context_length, await self._params(asked)
        if len(asked.prompts) * asked.num_answers > MOST_ANSWERS:
            field = "n" if asked.num_answers > 1 else asked.field
            raise ApiError(f"{field}: more than {MOST_ANSWERS} answers of one request", param=field)
        found: list[Generation] = []
        for prompt in asked.prompts:
            ids = await self.token_ids(prompt, asked.field, context, asked.add_special_tokens)
            limit = max(1, context - len(ids)) if asked.limit is None else params.max_new_tokens
            limit = max(limit, params.min_new_tokens)
            wishes = [await self._placed(one, ids, asked.field) for one in asked.wishes]
            forgets = tuple(wish for wish in wishes if wish.body.get("verb") == "forget")
            for number in range(asked.num_answers):
                seed = None if params.seed is None else _wrapped(params.seed + number)
                own = replace(params, max_new_tokens=limit, seed=seed)
                rid = f"{request_id}-{len(found)}" if found else request_id
                scope = replace(asked.scope, wishes=forgets if number else tuple(wishes))
                found.append(Generation(rid, ids, own, scope))
        return found

    async def _placed(self, asked: AskedWish, ids: Sequence[int], field: str) -> PromptWish:
        """A wish with the number of tokens of the prompt that it is about."""
        if asked.upto is None:
            return asked.wish
        try:
            part = await self.token_ids(asked.upto, field, None)
        except (ApiError, TimeoutError) as error:  # such as a template that renders no part of it
            answer = {"state": "refused", "reason": f"its place is not known: {error}"}
            return replace(asked.wish, answer=answer)
        differs = compress(count(), map(ne, part, ids))
        return replace(asked.wish, num_tokens=next(differs, min(len(part), len(ids))))

    async def _params(self, asked: ApiRequest) -> SamplingParams:
        form = asked.form
        if form is None:
            return asked.params

        try:
            grammar = await self._forms.run(form.make, GRAMMAR_TIMEOUT_S)
            if not self.service.knows_grammar(grammar):  # else it need not wait for those of others
                await self._grammars.run(partial(self.service.check_grammar, grammar), GRAMMAR_TIMEOUT_S)
            return replace(asked.params, grammar=grammar)
        except EngineBusy as error:
            raise api_error(error, form.field) from error
        except RequestError as error:
            message = f"{form.field}: {str(error).removeprefix('grammar: ')}"
            raise ApiError(message, param=form.field) from error

    # -- answers ----------------------------------------------------------------------------

    async def answer(self, request: Request, job: AnswerJob) -> Response:
        """The response, whole or as events."""
        renderer = job.renderer
        rids = self._taken(job)
        run = Run(self.service, job.generations, request, job.field, self._metrics.observed, job.num_answers)
        pieces = _pieces(run, job)
        tally = Tally(job.num_answers)
        async with AsyncExitStack() as stack:
            stack.callback(self._serving.difference_update, rids)
            stack.push_async_callback(run.aclose)
            try:
                if not job.is_streamed:
                    return await self._whole(pieces, tally, renderer)
                first = await anext(pieces)
            except ClientGone:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            return EventStream(self._events(first, pieces, tally, renderer), stack.pop_all().aclose)
        raise AssertionError("the stack suppresses nothing")

    def _taken(self, job: AnswerJob) -> list[str]:
        """Reserve the names of a job's answers until they are given back: whoever leaves ends the answers
        with these names. ApiError if another request has one."""
        rids = [generation.rid for generation in job.generations]
        if not self._serving.isdisjoint(rids):
            raise ApiError("request_id: a request of this name is being served", param="request_id")
        self._serving.update(rids)
        return rids

    async def _whole(self, pieces: AsyncIterator[Piece], tally: Tally, renderer: Renderer) -> Response:
        answers: dict[int, WholeAnswer] = {}
        async for piece in pieces:
            tally.note(piece)
            answers.setdefault(piece.index, WholeAnswer(piece.index)).add(piece)
        ordered = [answers[index] for index in sorted(answers)]
        scores = [item for one in ordered for item in (*one.logprobs, *one.prompt_logprobs)]
        return await self.show(partial(_response, renderer, ordered, tally.usage), _are_many(scores))

    async def _events(
        self, first: Piece, rest: AsyncIterator[Piece], tally: Tally, renderer: Renderer
    ) -> AsyncIterator[bytes]:
        """The answer's events, in the dialect's form."""
        for one in renderer.opening():
            yield one
        piece: Piece | None = first
        try:
            while piece is not None:
                tally.note(piece)
                make = partial(renderer.events, piece)
                scores = piece.output.prompt_logprobs  # those of an answer come one by one
                for one in await self.show(make, _are_many(scores)) if scores else make():
                    yield one
                piece = await anext(rest, None)
        except (ApiError, EngineBusy, TimeoutError) as error:
            failure = error if isinstance(error, ApiError) else api_error(error, "prompt_logprobs")
            for one in renderer.failure(failure):
                yield one
        except ClientGone:
            return
        else:
            for one in renderer.closing(tally.usage):
                yield one


def _are_many(scores: Sequence[TokenLogprob]) -> bool:
    return sum(1 + len(item.top) for item in scores) > MANY_LOGPROBS


def _wrapped(seed: int) -> int:
    """The seed wrapped into 64 bits, signed."""
    return (seed + 2**63) % 2**64 - 2**63


def _is_of_tools(message: Json) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _response(renderer: Renderer, answers: list[WholeAnswer], usage: Usage) -> Response:
    return JSONResponse(renderer.whole(answers, usage))


async def _pieces(run: Run, job: AnswerJob) -> AsyncIterator[Piece]:
    readers = [PieceReader(index, job.tools) for index in range(len(job.generations))]
    async for index, output in run:
        yield readers[index].read(output)


class EventStream(Response):
    """Server-sent events; `close` runs however the sending ends, also when it never began."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[None]]):
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: ConnectionScope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._close()


def new_id(prefix: str, rid: str | None = None) -> str:
    """A request's name: as the client has it, or a new one."""
    return f"{prefix}{rid or uuid.uuid4().hex}"
