"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the same request.

`cache_control` marks are checked and counted. A prompt is cached whole here, whatever they say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from hiradix.apps.engine.api import (
    FINISH_LENGTH,
    FINISH_TOOL,
    ChatPrompt,
    RequestError,
    SamplingParams,
    Scope,
    Usage,
)
from hiradix.apps.server.answering import Answering, AnswerJob, new_id
from hiradix.apps.server.api_request import ApiRequest, Piece, WholeAnswer
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.fields import MESSAGES
from hiradix.apps.server.generation import api_error
from hiradix.apps.server.intake import read_body
from hiradix.apps.server.messages import (
    MAX_TOOLS,
    NamedFunction,
    NamedTool,
    answer_form,
    text_only,
    tool_use,
)
from hiradix.apps.server.render import Json, Renderer, event, tiers_json
from hiradix.apps.server.schema import AddressedBody, Name, Owner, StopText, StrictBody, session_of
from hiradix.apps.server.service import Generation
from hiradix.apps.server.tools import TextDelta

MOST_MARKS = 4  # of cache_control, as Anthropic has it


class CacheControl(StrictBody):
    """A mark: what is before it may be asked for again within `ttl`."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(StrictBody):
    """A piece of text."""

    type: Annotated[Literal["text"], BeforeValidator(text_only)]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[None], Field(max_length=0)] | None = None


class Block(StrictBody):
    """A block of a message: text, a call, or what came of one."""

    type: Annotated[Literal["text", "tool_use", "tool_result"], BeforeValidator(text_only)]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    citations: Annotated[list[None], Field(max_length=0)] | None = None
    caller: dict[str, Any] | None = None

    def need(self, name: str, field: str) -> Any:
        """One of its fields. ApiError where it is not there."""
        value = getattr(self, name)
        if value is None:
            raise ApiError(f"{field}.{name}: is needed", param=f"{field}.{name}")
        return value

    @property
    def result(self) -> str:
        """The result of a call, as text."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return f"Error: {text}" if self.is_error else text


class AnthropicMessage(StrictBody):
    """One turn."""

    role: Literal["user", "assistant"]
    content: str | list[Block]

    def plain(self, field: str) -> list[Json]:
        """The message in the form of chat templates: a call's result is a message of its own. Raises
        ApiError."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        found: list[Json] = []
        texts: list[str] = []
        calls: list[Json] = []
        for number, block in enumerate(self.content):
            at = f"{field}.content.{number}"
            if block.type == "text":
                texts.append(block.need("text", at))
            elif (block.type == "tool_use") != (self.role == "assistant"):
                raise ApiError(f"{at}.type: {block.type} is not the {self.role}'s", param=f"{at}.type")
            elif block.type == "tool_use":
                function = {"name": block.need("name", at), "arguments": block.need("input", at)}
                calls.append({"id": block.need("id", at), "type": "function", "function": function})
            else:
                call_id = block.need("tool_use_id", at)
                found.append({"role": "tool", "tool_call_id": call_id, "content": block.result})
        if texts or calls or not found:
            more = {"tool_calls": calls} if calls else {}
            found.append({"role": self.role, "content": "".join(texts), **more})
        return found

    @property
    def marks(self) -> int:
        """The number of its `cache_control`."""
        if isinstance(self.content, str):
            return 0
        own: list[Any] = list(self.content)
        for block in self.content:
            own += block.content if isinstance(block.content, list) else ()
        return sum(one.cache_control is not None for one in own)


class AnthropicTool(StrictBody):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:-]+$")]
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None

    def plain(self) -> Json:
        """The tool in the form of chat templates."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class AnthropicChoice(StrictBody):
    """Whether, and which, function is to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountBody(AddressedBody):
    """POST /v1/messages/count_tokens: a conversation."""

    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=10_000)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicChoice | None = None
    cache_control: CacheControl | None = None

    def conversation(self, answering: Answering) -> ChatPrompt:
        """The conversation to make tokens of; an assistant's last message is continued. Raises ApiError."""
        if self.num_marks > MOST_MARKS:
            told = f"cache_control: {self.num_marks} marks, at most {MOST_MARKS} are taken"
            raise ApiError(told, param="cache_control")
        system = self.system or ""
        text = system if isinstance(system, str) else "".join(part.text for part in system)
        plain: list[Json] = [{"role": "system", "content": text}] if text else []
        for number, message in enumerate(self.messages):
            plain += message.plain(f"messages.{number}")
        continues = plain[-1]["role"] == "assistant" and not plain[-1].get("tool_calls")
        try:
            return answering.conversation(
                plain, self.plain_tools, opens_answer=not continues, continues_last=continues
            )
        except RequestError as error:
            raise api_error(error, "messages") from error

    @property
    def plain_tools(self) -> list[Json]:
        """The tools in the form of chat templates."""
        return [tool.plain() for tool in self.tools or ()]

    @property
    def num_marks(self) -> int:
        """The number of `cache_control` in all of the body."""
        system = self.system if isinstance(self.system, list) else []
        own: list[Any] = [*system, *(self.tools or ()), self]
        return sum(one.cache_control is not None for one in own) + sum(one.marks for one in self.messages)


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = None
    stream: bool | None = None
    session_id: Name | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0

    def asked(self, answering: Answering, owner: Owner, session: str) -> ApiRequest:
        """The request to the engine. ApiError names the field."""
        asked = self.tool_choice or AnthropicChoice(type="auto")
        choices: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
        choice = choices.get(asked.type) or NamedTool(
            type="function", function=NamedFunction(name=asked.name or "")
        )
        parallel = not asked.disable_parallel_tool_use
        use, forced = tool_use(answering, self.plain_tools, choice, parallel)
        more: Json = {}
        if use is not None:
            more["tool_markers"] = ("",) if use.is_forced else use.form.markers
            more["skip_special_tokens"] = not use.form.is_special
        try:
            params = SamplingParams(
                max_new_tokens=self.max_tokens,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=max(0, self.top_k or 0),
                stop=tuple(self.stop_sequences or ()),
                **more,
            )
        except RequestError as error:
            raise api_error(error, "body") from error
        return ApiRequest(
            prompts=[self.conversation(answering)],
            field="messages",
            params=params,
            limit=self.max_tokens,
            scope=Scope(*self.namespace(owner), self.priority, None, self.session_id or session),
            tools=use,
            form=answer_form(answering, use, forced, None, None),
            is_streamed=bool(self.stream),
        )


def anthropic_error(error: ApiError) -> Json:
    """An error in Anthropic's form."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
             413: "request_too_large", 503: "overloaded_error"}  # fmt: skip
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class AnthropicRenderer(Renderer):
    """A message, whole or as events. is_marked: with `cache_control`, so that what was written is told."""

    def __init__(self, id: str, model: str, is_marked: bool, generations: Sequence[Generation]):
        self._id, self._model, self._is_marked = id, model, is_marked
        self._block = -1
        self._kind = ""
        self._last: Piece | None = None

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> Json:
        """The body of an answer that is sent whole."""
        [answer] = answers
        content: list[Json] = [{"type": "text", "text": answer.text}] if answer.text else []
        for call in answer.calls:
            content.append(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
            )
        stop = _stop(answer.finish_reason, answer.matched_stop)
        return {**self._message(content, usage), **stop}

    def events(self, piece: Piece) -> list[bytes]:
        """Blocks as they grow."""
        found = []
        if self._last is None:
            usage = Usage(piece.output.usage.prompt_tokens, 0, *_sources(piece.output.usage))
            message = {**self._message([], usage), "stop_reason": None, "stop_sequence": None}
            found.append(self._event("message_start", message=message))
        self._last = piece
        for delta in piece.deltas:
            if isinstance(delta, TextDelta):
                found += self._into("text", {"type": "text", "text": ""}, self._kind == "text")
                found.append(self._delta({"type": "text_delta", "text": delta.text}))
                continue
            if delta.name:
                block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
                found += self._into("tool_use", block, False)
            if delta.arguments:
                found.append(self._delta({"type": "input_json_delta", "partial_json": delta.arguments}))
        return found

    def closing(self, usage: Usage) -> list[bytes]:
        """The reason of the end, and the usage."""
        last = self._last
        stop = _stop(
            None if last is None else last.finish_reason, None if last is None else last.output.matched_stop
        )
        return [
            *self._end_block(),
            self._event("message_delta", delta=stop, usage=self._usage(usage)),
            self._event("message_stop"),
        ]

    def failure(self, error: ApiError) -> list[bytes]:
        """The error."""
        return [event(anthropic_error(error), "error")]

    def _into(self, kind: str, block: Json, goes_on: bool) -> list[bytes]:
        if goes_on:
            return []
        ended = self._end_block()
        self._kind, self._block = kind, self._block + 1
        return [*ended, self._event("content_block_start", index=self._block, content_block=block)]

    def _end_block(self) -> list[bytes]:
        if not self._kind:
            return []
        self._kind = ""
        return [self._event("content_block_stop", index=self._block)]

    def _delta(self, delta: Json) -> bytes:
        return self._event("content_block_delta", index=self._block, delta=delta)

    def _event(self, name: str, **fields: Any) -> bytes:
        return event({"type": name, **fields}, name)

    def _message(self, content: list[Json], usage: Usage) -> Json:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, "usage": self._usage(usage)}

    def _usage(self, usage: Usage) -> Json:
        """Anthropic's counts, which exclude each other, and the tiers of what was read."""
        computed = usage.prompt_tokens - usage.cached_tokens
        written = computed if self._is_marked else 0
        return {
            "input_tokens": computed - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "cached_tokens_details": tiers_json(usage),
        }


def _sources(usage: Usage) -> tuple[int, int, int]:
    return usage.cached_device, usage.cached_host, usage.cached_storage


def _stop(finish_reason: str | None, matched: str | None) -> Json:
    if finish_reason == FINISH_TOOL:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if finish_reason == FINISH_LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "stop_sequence" if matched else "end_turn", "stop_sequence": matched}


def _input(arguments: str) -> Any:
    """A call's arguments; those that were cut short, and what is no object of JSON's values, as text."""
    try:
        value = json.loads(arguments, strict=False)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"partial_json": arguments}


class Anthropic:
    """Anthropic's endpoints over one engine."""

    def __init__(self, answering: Answering):
        self._answering = answering
        self.router = APIRouter(prefix="/v1/messages")
        self.router.add_api_route("", self.messages, methods=["POST"])
        self.router.add_api_route("/count_tokens", self.count_tokens, methods=["POST"])

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages."""
        return await self._answering.answer(request, await self._job(request))

    async def _job(self, request: Request) -> AnswerJob:
        answering = self._answering
        with answering.intake.body() as share:
            body = await read_body(request, MessagesBody, share, MESSAGES)
            model = answering.check_model(body.model)
            asked = body.asked(answering, answering.owner(request), session_of(request))
            own_id = new_id("msg_")
            make = partial(AnthropicRenderer, own_id, model, body.num_marks > 0)
            return await answering.job(asked, own_id, make)

    async def count_tokens(self, request: Request) -> Json:
        """POST /v1/messages/count_tokens."""
        answering = self._answering
        with answering.intake.body() as share:
            body = await read_body(request, CountBody, share, MESSAGES)
            answering.check_model(body.model)
            ids = await answering.token_ids(body.conversation(answering), "messages", None)
        return {"input_tokens": len(ids)}
