"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the same request.

A prompt is cached whole here, whatever its `cache_control` marks say; what is before them is held besides.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
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
from hiradix.apps.server.api_request import ApiRequest, AskedWish, Piece, WholeAnswer
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.fields import MESSAGES
from hiradix.apps.server.generation import api_error
from hiradix.apps.server.intake import read_body
from hiradix.apps.server.messages import (
    MAX_TOOLS,
    FunctionName,
    ItemBody,
    NamedFunction,
    NamedTool,
    answer_form,
    joined_text,
    text_only,
    tool_use,
)
from hiradix.apps.server.render import Json, Renderer, event, tiers_json
from hiradix.apps.server.schema import AddressedBody, Name, Owner, StopText, StrictBody, session_of
from hiradix.apps.server.service import Generation
from hiradix.apps.server.tools import TextDelta
from hiradix.apps.server.wishes import FRONT, TTL_S, CacheMark, Wished, of_field, of_marks, told

MOST_MARKS = 4  # of cache_control, as Anthropic has it


class CacheControl(StrictBody):
    """A mark: what is before it may be asked for again within `ttl`."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def ttl_s(self) -> float:
        """Seconds."""
        return TTL_S[self.ttl or "5m"]


class TextBlock(StrictBody):
    """A piece of text."""

    type: Annotated[Literal["text"], BeforeValidator(text_only)]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[None], Field(max_length=0)] | None = None


class Block(ItemBody):
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

    @property
    def result(self) -> str:
        """The result of a call, as text."""
        text = joined_text(self.content or "")
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

    def marks(self) -> list[tuple[int, CacheControl]]:
        """The message's `cache_control`, in order, each with the number of its block."""
        found = []
        for place, block in enumerate([] if isinstance(self.content, str) else self.content):
            inner = block.content if isinstance(block.content, list) else ()
            controls = [*(part.cache_control for part in inner), block.cache_control]
            found += [(place, control) for control in controls if control is not None]
        return found

    def upto(self, place: int) -> AnthropicMessage:
        """The message as far as a block of it."""
        content = self.content if isinstance(self.content, str) else self.content[: place + 1]
        return self.model_copy(update={"content": content})


class AnthropicTool(StrictBody):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
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
            why = f"cache_control: {self.num_marks} marks, at most {MOST_MARKS} are taken"
            raise ApiError(why, param="cache_control")
        plain = self.plain_messages(self.messages)
        continues = plain[-1]["role"] == "assistant" and not plain[-1].get("tool_calls")
        return answering.conversation(
            plain, self.plain_tools, opens_answer=not continues, continues_last=continues
        )

    def plain_messages(self, messages: Sequence[AnthropicMessage]) -> list[Json]:
        """The system's text and these messages, as templates take them. ApiError."""
        text = joined_text(self.system or "")
        plain: list[Json] = [{"role": "system", "content": text}] if text else []
        for number, message in enumerate(messages):
            plain += message.plain(f"messages.{number}")
        return plain

    def marks(self) -> list[CacheMark]:
        """The body's `cache_control` in the prompt's order. Tools and system are one place: a template decides
        which is first."""
        system = self.system if isinstance(self.system, list) else []
        front: list[AnthropicTool | TextBlock] = [*(self.tools or ()), *system]
        found = [CacheMark(one.cache_control.ttl_s, FRONT) for one in front if one.cache_control is not None]
        last = len(self.messages) - 1
        for number, message in enumerate(self.messages):
            for place, control in message.marks():
                is_end = number == last and place == len(message.content) - 1
                found.append(CacheMark(control.ttl_s, None if is_end else (number, place)))
        if self.cache_control is not None:
            found.append(CacheMark(self.cache_control.ttl_s))
        return found

    def _cut(self, number: int, place: int) -> list[Json]:
        return self.plain_messages([*self.messages[:number], self.messages[number].upto(place)])

    def marked(self, answering: Answering) -> list[AskedWish]:
        """The wishes of the marks. ApiError."""
        make = partial(answering.conversation, tools=self.plain_tools, opens_answer=False)
        return of_marks(self.marks(), self.plain_messages(self.messages), self._cut, make)

    @property
    def plain_tools(self) -> list[Json]:
        """The tools in the form of chat templates."""
        return [tool.plain() for tool in self.tools or ()]

    @property
    def num_marks(self) -> int:
        """The number of `cache_control` in all of the body."""
        return len(self.marks())


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
    hiradix: Wished = None

    def asked(self, answering: Answering, owner: Owner, session: str) -> ApiRequest:
        """The request to the engine. ApiError names the field."""
        asked = self.tool_choice or AnthropicChoice(type="auto")
        choices: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
        choice = choices.get(asked.type) or NamedTool(
            type="function", function=NamedFunction(name=asked.name or "")
        )
        parallel = not asked.disable_parallel_tool_use
        use, forced = tool_use(answering, self.plain_tools, choice, parallel)
        use, form = answer_form(answering, use, forced, None, None)
        try:
            params = SamplingParams(
                max_new_tokens=self.max_tokens,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=max(0, self.top_k or 0),
                stop=tuple(self.stop_sequences or ()),
                **({} if use is None else use.sampling),
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
            form=form,
            wishes=[*self.marked(answering), *of_field(self.hiradix)],
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
            usage = replace(piece.output.usage, completion_tokens=0)
            message = {**self._message([], usage), "stop_reason": None, "stop_sequence": None}
            found.append(self._event("message_start", message=message))
        self._last = piece
        for delta in piece.deltas:
            if isinstance(delta, TextDelta):
                if self._kind != "text":
                    found += self._begin_block({"type": "text", "text": ""})
                found.append(self._delta({"type": "text_delta", "text": delta.text}))
                continue
            if delta.name:
                block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
                found += self._begin_block(block)
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

    def _begin_block(self, block: Json) -> list[bytes]:
        ended = self._end_block()
        self._kind, self._block = block["type"], self._block + 1
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
            **told(usage.wishes),
        }


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
