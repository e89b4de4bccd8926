"""POST /v1/responses: OpenAI's newer API, without state: every request brings its whole input.

An answer does not repeat the request's instructions and tools.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from hiradix.apps.engine.api import FINISH_LENGTH, RequestError, SamplingParams, Scope, Usage
from hiradix.apps.server.answering import Answering, AnswerJob, new_id
from hiradix.apps.server.api_request import AnswerForm, ApiRequest, MadeCall, Piece, WholeAnswer
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.fields import RESPONSES
from hiradix.apps.server.generation import api_error
from hiradix.apps.server.intake import read_body
from hiradix.apps.server.messages import (
    MAX_TOOLS,
    FunctionBody,
    FunctionCall,
    FunctionName,
    ItemBody,
    NamedFunction,
    NamedTool,
    ToolBody,
    ToolCall,
    answer_form,
    joined_text,
    text_only,
    tool_use,
)
from hiradix.apps.server.render import Json, Renderer, event, tiers_json
from hiradix.apps.server.sampling import JsonSchemaForm, ResponseFormat
from hiradix.apps.server.schema import AddressedBody, Name, Owner, StrictBody, session_of
from hiradix.apps.server.service import Generation
from hiradix.apps.server.tools import TextDelta
from hiradix.apps.server.wishes import Wished, of_field, of_prompt_cache, session_of_key, told


class ContentPart(StrictBody):
    """A piece of a message's content; only text is supported."""

    type: Annotated[Literal["input_text", "output_text", "text"], BeforeValidator(text_only)]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputItem(ItemBody):
    """A message, a call that an earlier answer made, or what came of one."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FlatTool(StrictBody):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def plain(self) -> Json:
        """The tool in the form of chat templates."""
        function = FunctionBody(name=self.name, description=self.description, parameters=self.parameters)
        return ToolBody(type="function", function=function).plain()


class FlatChoice(StrictBody):
    """`tool_choice`: this function is to be called."""

    type: Literal["function"]
    name: str


class TextFormat(StrictBody):
    """The form of an answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def response_format(self) -> ResponseFormat:
        """The same as a `response_format` of chat completions."""
        form = None
        if self.type == "json_schema":
            form = JsonSchemaForm.model_validate({"schema": self.schema_})
        return ResponseFormat(type=self.type, json_schema=form)


class TextOptions(StrictBody):
    """The answer's form."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(AddressedBody):
    """Input items, and the functions that the answer may call."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=10_000)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Literal[0] | None = None
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    stream_options: dict[str, Literal[False]] | None = None
    session_id: Name | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    hiradix: Wished = None

    def messages(self) -> list[Json]:
        """The messages in the form of chat templates: calls belong to the assistant's message before them.
        ApiError."""
        found: list[Json] = []
        if self.instructions:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input):
            field = f"input.{number}"
            if item.type == "message":
                role = item.need("role", field)
                role = "system" if role == "developer" else role
                found.append({"role": role, "content": joined_text(item.need("content", field))})
            elif item.type == "function_call":
                function = FunctionCall(name=item.need("name", field), arguments=item.arguments or "{}")
                call = ToolCall(id=item.need("call_id", field), function=function).plain(field)
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": ""})
                found[-1].setdefault("tool_calls", []).append(call)
            else:
                call_id, output = item.need("call_id", field), joined_text(item.need("output", field))
                found.append({"role": "tool", "tool_call_id": call_id, "content": output})
        return found

    def asked(self, answering: Answering, owner: Owner, session: str) -> ApiRequest:
        """The request to the engine. ApiError names the field."""
        tools = [tool.plain() for tool in self.tools or ()]
        choice: Any = self.tool_choice
        if isinstance(choice, FlatChoice):
            choice = NamedTool(type="function", function=NamedFunction(name=choice.name))
        use, forced = tool_use(answering, tools, choice, self.parallel_tool_calls)
        use, form = answer_form(answering, use, forced, *self._form())
        limit, named = self.max_output_tokens, self.session_id or session
        wishes = of_prompt_cache(self.prompt_cache_key, self.prompt_cache_retention, bool(named))
        named = named or session_of_key(self.prompt_cache_key)
        try:
            params = SamplingParams(
                max_new_tokens=limit or 1,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                **({} if use is None else use.sampling),
            )
        except RequestError as error:
            raise api_error(error, "input") from error
        return ApiRequest(
            prompts=[answering.conversation(self.messages(), tools)],
            field="input",
            params=params,
            limit=limit,
            scope=Scope(*self.namespace(owner), self.priority, None, named),
            tools=use,
            form=form,
            wishes=[*wishes, *of_field(self.hiradix)],
            is_streamed=bool(self.stream),
        )

    def _form(self) -> tuple[AnswerForm | None, Any]:
        asked = None if self.text is None or self.text.format is None else self.text.format.response_format()
        make = None if asked is None else asked.make_grammar()
        if asked is None or make is None:
            return None, None
        return AnswerForm("text.format", make), asked.schema_of()


class ResponsesRenderer(Renderer):
    """A response, whole or as events. head: what every form of it has."""

    def __init__(self, head: Json, generations: Sequence[Generation]):
        self._head = head
        self._number = -1
        self._items: list[Json] = []
        self._text: Json | None = None
        self._call: Json | None = None
        self._finish_reason: str | None = None

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> Json:
        """The body of an answer that is sent whole."""
        [answer] = answers
        output = [_message(answer.text)] if answer.text or not answer.calls else []
        output += [_call(call) for call in answer.calls]
        return self._response(output, answer.finish_reason, usage)

    def opening(self) -> list[bytes]:
        """The events that a response has been made, and is under way."""
        response = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def events(self, piece: Piece) -> list[bytes]:
        """Items as they grow."""
        found: list[bytes] = []
        self._finish_reason = piece.finish_reason
        for delta in piece.deltas:
            if isinstance(delta, TextDelta):
                found += self._grow_text(delta.text)
                continue
            if delta.name:
                found += self._end_item()
                self._call = _call(MadeCall(delta.id, delta.name, ""))
                found.append(self._added({**self._call, "status": "in_progress"}))
            if delta.arguments and self._call is not None:
                self._call["arguments"] += delta.arguments
                found.append(
                    self._of_item("function_call_arguments.delta", self._call, delta=delta.arguments)
                )
        return found

    def closing(self, usage: Usage) -> list[bytes]:
        """The whole response."""
        ended = self._end_item()
        response = self._response(self._items, self._finish_reason, usage)
        return [*ended, self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: ApiError) -> list[bytes]:
        """The error."""
        about = {"code": error.code or "server_error", "message": error.message, "param": error.param}
        return [self._event("error", **about)]

    def _grow_text(self, text: str) -> list[bytes]:
        found: list[bytes] = []
        if self._text is None:
            found += self._end_item()
            self._text = _message("")
            found.append(self._added({**self._text, "status": "in_progress", "content": []}))
            part = {"type": "output_text", "text": "", "annotations": []}
            found.append(self._of_item("content_part.added", self._text, content_index=0, part=part))
        self._text["content"][0]["text"] += text
        more = {"content_index": 0, "delta": text, "logprobs": []}
        return [*found, self._of_item("output_text.delta", self._text, **more)]

    def _end_item(self) -> list[bytes]:
        found: list[bytes] = []
        if self._text is not None:
            item, self._text = self._text, None
            part = item["content"][0]
            more = {"content_index": 0, "text": part["text"], "logprobs": []}
            found.append(self._of_item("output_text.done", item, **more))
            found.append(self._of_item("content_part.done", item, content_index=0, part=part))
        elif self._call is not None:
            item, self._call = self._call, None
            more = {"arguments": item["arguments"], "name": item["name"]}
            found.append(self._of_item("function_call_arguments.done", item, **more))
        else:
            return []
        index = len(self._items)
        self._items.append(item)
        return [*found, self._event("response.output_item.done", output_index=index, item=item)]

    def _added(self, item: Json) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _of_item(self, name: str, item: Json, /, **more: Any) -> bytes:
        at = {"item_id": item["id"], "output_index": len(self._items)}
        return self._event(f"response.{name}", **at, **more)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number, **fields}, name)

    def _response(self, output: list[Json], finish_reason: str | None, usage: Usage) -> Json:
        is_cut = finish_reason == FINISH_LENGTH
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, **tiers_json(usage)},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                **told(usage.wishes),
            },
        }


def _message(text: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "completed",
            "content": [part]}  # fmt: skip


def _call(call: MadeCall) -> Json:
    return {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "completed",
            "call_id": call.id, "name": call.name, "arguments": call.arguments}  # fmt: skip


class Responses:
    """The endpoint over one engine."""

    def __init__(self, answering: Answering):
        self._answering = answering
        self.router = APIRouter(prefix="/v1")
        self.router.add_api_route("/responses", self.responses, methods=["POST"])

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses."""
        return await self._answering.answer(request, await self._job(request))

    async def _job(self, request: Request) -> AnswerJob:
        answering = self._answering
        with answering.intake.body() as share:
            body = await read_body(request, ResponsesBody, share, RESPONSES)
            model = answering.check_model(body.model)
            asked = body.asked(answering, answering.owner(request), session_of(request))
            choice = body.tool_choice
            head: Json = {
                "id": new_id("resp_"), "object": "response", "created_at": int(time.time()), "model": model,
                "error": None, "incomplete_details": None, "instructions": None, "metadata": {}, "tools": [],
                "tool_choice": choice.model_dump() if isinstance(choice, FlatChoice) else choice or "auto",
                "parallel_tool_calls": body.parallel_tool_calls is not False, "store": False,
                "temperature": asked.params.temperature, "top_p": asked.params.top_p,
                "max_output_tokens": body.max_output_tokens, "previous_response_id": None, "background": False,
            }  # fmt: skip
            return await answering.job(asked, head["id"], partial(ResponsesRenderer, head))
