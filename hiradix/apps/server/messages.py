"""Messages and tools as OpenAI's chat API has them, and what a chat template is given of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hiradix.apps.engine import grammar as forms
from hiradix.apps.engine.api import ChatPrompt
from hiradix.apps.server.answering import Answering
from hiradix.apps.server.api_request import AnswerForm, ToolUse
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.render import Json
from hiradix.apps.server.schema import StrictBody
from hiradix.apps.server.tools import calls_rules
from hiradix.apps.server.wishes import FRONT, CacheMark, ttl_of

MAX_TOOLS = 512
OTHER_PARTS = (
    "image_url",
    "input_audio",
    "file",
    "video_url",
    "audio_url",
    "image",
    "input_image",
    "input_file",
)


def text_only(value: Any) -> Any:
    """A part's type, with a word about those that are of other models."""
    if isinstance(value, str) and value in OTHER_PARTS:
        raise ValueError(f"{value} is not supported: this server's models take text")
    return value


class TextPart(StrictBody):
    """A piece of a message's content; only text is supported."""

    type: Annotated[Literal["text"], BeforeValidator(text_only)]
    text: str
    cache_control: dict[str, Any] | None = None


def joined_text(content: str | list[Any]) -> str:
    """A content as one text. content: the text, or parts that have one each."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ItemBody(StrictBody):
    """One of several kinds of things, each of which needs other fields."""

    def need(self, name: str, field: str) -> Any:
        """One of its fields. ApiError where it is not there."""
        value = getattr(self, name)
        if value is None:
            raise ApiError(f"{field}.{name}: is needed", param=f"{field}.{name}")
        return value


class FunctionCall(StrictBody):
    """The called function and its arguments, as JSON."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(StrictBody):
    """A call that an earlier answer made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None

    def plain(self, field: str) -> Json:
        """The call in the form of chat templates: arguments are an object. Raises ApiError."""
        arguments: Any = self.function.arguments
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            name = f"{field}.function.arguments"
            raise ApiError(f"{name}: must be a JSON object", param=name)
        return {
            "id": self.id or "", "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }  # fmt: skip


class MessageBody(StrictBody):
    """One chat message, with the empty fields that official clients put into an answer they send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[None], Field(max_length=0)] | None = None
    reasoning_content: None = None
    reasoning: None = None

    def plain(self, field: str = "messages") -> Json:
        """The message as the chat template takes it. ApiError names what is missing of it."""
        found: Json = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.content is None and self.role != "assistant":
            raise ApiError(f"{field}.content: is needed", param=f"{field}.content")
        if self.tool_calls and self.role != "assistant":
            raise ApiError(f"{field}.tool_calls: are the assistant's", param=f"{field}.tool_calls")
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            found["tool_calls"] = [call.plain(f"{field}.tool_calls.{number}") for number, call in calls]
        if self.name is not None:
            found["name"] = self.name
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        return found

    @property
    def text(self) -> str:
        """The message's content, parts put together."""
        return joined_text(self.content or self.refusal or "")


Messages = Annotated[list[MessageBody], Field(min_length=1, max_length=10_000)]


def plain_messages(messages: Sequence[MessageBody]) -> list[Json]:
    """Messages as the chat template takes them. Raises ApiError."""
    return [message.plain(f"messages.{number}") for number, message in enumerate(messages)]


class RenderedBody(StrictBody):
    """The fields by which the chat template renders a conversation."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None

    def conversation(
        self, answering: Answering, messages: Sequence[Json], tools: Sequence[Json]
    ) -> ChatPrompt:
        """The conversation to render. ApiError."""
        continues = bool(self.continue_final_message)
        opens = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return self._part(answering, messages, tools, opens_answer=opens, continues_last=continues)

    def beginning(self, answering: Answering, messages: Sequence[Json], tools: Sequence[Json]) -> ChatPrompt:
        """A part of the conversation up to some message, with no answer opened behind it. ApiError."""
        return self._part(answering, messages, tools, opens_answer=False)

    def _part(
        self, answering: Answering, messages: Sequence[Json], tools: Sequence[Json], **more: bool
    ) -> ChatPrompt:
        given = self.chat_template_kwargs or {}
        special = bool(self.add_special_tokens)
        return answering.conversation(
            messages, tools, template_kwargs=given, add_special_tokens=special, **more
        )


def marks_of(messages: Sequence[MessageBody]) -> list[CacheMark]:
    """The `cache_control` marks of messages' parts, in their order."""
    found: list[CacheMark] = []
    is_front, last = True, len(messages) - 1
    for number, message in enumerate(messages):
        is_front = is_front and message.role in ("system", "developer")
        parts = message.content if isinstance(message.content, list) else []
        for place, part in enumerate(parts):
            if part.cache_control is not None:
                is_end = number == last and place == len(parts) - 1
                at = None if is_end else FRONT if is_front else (number, place)
                found.append(CacheMark(ttl_of(part.cache_control), at))
    return found


def cut_at(messages: Sequence[MessageBody], plain: Sequence[Json], number: int, place: int) -> list[Json]:
    """Messages up to a part of one of them, as the chat template takes them. plain: all of them so."""
    content, last = messages[number].content, plain[number]
    if isinstance(content, list):
        last = {**last, "content": joined_text(content[: place + 1])}
    return [*plain[:number], last]


FunctionName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:-]+$")]


class FunctionBody(StrictBody):
    """A function that the model may call. strict: calls match `parameters` where they are forced."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(StrictBody):
    """A tool; only functions are there."""

    type: Literal["function"]
    function: FunctionBody

    def plain(self) -> Json:
        """The tool in the form of chat templates."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {
            "type": "function",
            "function": {"parameters": {"type": "object", "properties": {}}, **function},
        }


Tools = Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)]


class NamedFunction(StrictBody):
    """The name of a function."""

    name: str


class NamedTool(StrictBody):
    """`tool_choice`: this function is to be called."""

    type: Literal["function"]
    function: NamedFunction


Choice = Literal["none", "auto", "required"] | NamedTool


def tool_use(
    answering: Answering, tools: Sequence[Json], choice: Choice | None, parallel: bool | None
) -> tuple[ToolUse | None, Sequence[Json]]:
    """The way an answer may call, None if it may not, and the functions it may be forced to call. Raises
    ApiError."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError("tool_choice: there are no tools", param="tool_choice")
        return None, ()
    if choice == "none":
        return None, ()
    is_forced, forced = choice == "required", tools
    if isinstance(choice, NamedTool):
        is_forced, name = True, choice.function.name
        forced = [tool for tool in tools if tool["function"]["name"] == name]
        if not forced:
            raise ApiError(f"tool_choice: {name[:64]!r} is none of the tools", param="tool_choice")
    most_one = parallel is False or isinstance(choice, NamedTool)
    return ToolUse(answering.tool_format, is_forced, most_one), forced


def answer_form(
    answering: Answering, use: ToolUse | None, tools: Sequence[Json], form: AnswerForm | None, schema: Any
) -> tuple[ToolUse | None, AnswerForm | None]:
    """How an answer calls that may call functions, or must, and its form. ApiError.

    tools: that it may call. form: what it is otherwise, which with tools must be JSON of `schema`. Calls are
    read as the grammar of a form writes them.
    """
    if use is None or (form is None and not use.is_forced):
        return use, form
    if form is None:
        field = "tools"
    elif use.is_forced:
        raise ApiError(f"tool_choice: excludes {form.field} where a call is forced", param="tool_choice")
    elif schema is None:
        raise ApiError(f"{form.field}: with tools, use response_format", param=form.field)
    else:
        field = form.field
    use = replace(use, form=use.form.forced)
    return use, AnswerForm(field, partial(_calls_grammar, answering, use, tools, schema))


def _calls_grammar(answering: Answering, use: ToolUse, tools: Sequence[Json], schema: Any) -> str:
    special = answering.service.special_token
    rules = calls_rules(use.form, tools, use.most_one, special)
    if schema is None:
        return forms.of_lark(f"start: calls\n{rules}")
    return forms.of_lark(f"start: calls | form\nform: %json {json.dumps(schema)}\n{rules}")
