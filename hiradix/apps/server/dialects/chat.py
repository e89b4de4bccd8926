"""POST /v1/chat/completions: conversations, tool calls, structured answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from hiradix.apps.engine.api import TokenLogprob, Usage
from hiradix.apps.server.answering import Answering
from hiradix.apps.server.api_request import ApiRequest, Piece, WholeAnswer
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.messages import (
    Choice,
    Messages,
    RenderedBody,
    Tools,
    answer_form,
    cut_at,
    marks_of,
    plain_messages,
    tool_use,
)
from hiradix.apps.server.render import (
    Envelope,
    Json,
    Renderer,
    event,
    prompt_logprobs_json,
    token_name,
    usage_json,
)
from hiradix.apps.server.sampling import GenerationBody
from hiradix.apps.server.schema import Owner
from hiradix.apps.server.service import Generation
from hiradix.apps.server.tools import TextDelta
from hiradix.apps.server.wishes import of_marks

KIND, CHUNK = "chat.completion", "chat.completion.chunk"


class ChatBody(GenerationBody, RenderedBody):
    """A conversation, and the functions that its answer may call."""

    messages: Messages
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    echo: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def num_logprobs(self) -> int | None:
        """Alternatives to report per token, None where no log probabilities are wanted."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs: needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def token_limit(self) -> int | None:
        """The answer's length limit under either of its two names."""
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ApiError("max_tokens: excludes max_completion_tokens", param="max_tokens")
        if self.max_tokens == 0:
            raise ApiError("max_tokens: must be at least 1", param="max_tokens")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def asked(self, answering: Answering, owner: Owner, session: str) -> ApiRequest:
        """The request to the engine. ApiError names the field."""
        if self.echo:
            raise ApiError("echo: send continue_final_message, or use completions", param="echo")
        limit, logprobs = self.token_limit(), self.num_logprobs()
        tools = [tool.plain() for tool in self.tools or ()]
        use, forced = tool_use(answering, tools, self.tool_choice, self.parallel_tool_calls)
        use, form = answer_form(answering, use, forced, self.form(), self.json_schema_of_answer())
        messages = plain_messages(self.messages)
        marked = of_marks(
            marks_of(self.messages), messages, partial(cut_at, self.messages, messages),
            partial(self.beginning, answering, tools=tools),
        )  # fmt: skip
        return ApiRequest(
            prompts=[self.conversation(answering, messages, tools)],
            field="messages",
            params=self.sampling(limit, logprobs, **({} if use is None else use.sampling)),
            limit=limit,
            scope=self.scope(owner, session),
            num_answers=self.n or 1,
            tools=use,
            form=form,
            wishes=[*marked, *self.wishes(session)],
            rid=self.own_id,
            is_streamed=bool(self.stream),
        )


class ChatRenderer(Renderer):
    """chat.completion and chat.completion.chunk."""

    def __init__(self, envelope: Envelope, generations: Sequence[Generation]):
        self._envelope = envelope
        self._num_answers = len(generations)

    def opening(self) -> list[bytes]:
        """The chunk that names the role, of each answer."""
        delta = {"role": "assistant", "content": ""}
        return [
            event(self._envelope.wrap(CHUNK, [{**_choice(index, None), "delta": delta}], None))
            for index in range(self._num_answers)
        ]

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> Json:
        """The body of an answer that is sent whole."""
        choices = []
        for one in answers:
            message: Json = {"role": "assistant", "content": one.text}
            if one.calls:
                message["content"] = one.text or None
                message["tool_calls"] = [
                    {"id": call.id, "type": "function",
                     "function": {"name": call.name, "arguments": call.arguments}}
                    for call in one.calls
                ]  # fmt: skip
            choice = {**_choice(one.index, one.finish_reason), "message": message}
            choices.append({**choice, **self._extras(one.logprobs, one.token_ids)})
        found = self._envelope.wrap(KIND, choices, usage_json(usage))
        if self._envelope.with_prompt_logprobs:
            found["prompt_logprobs"] = prompt_logprobs_json(
                answers[0].prompt_logprobs, self._envelope.token_text
            )
        return found

    def events(self, piece: Piece) -> list[bytes]:
        """New text and calls as deltas, the last with the reason of the end."""
        output = piece.output
        deltas = [_delta(delta) for delta in piece.deltas]
        if not deltas:
            if not (piece.finish_reason or self._envelope.is_shown(output)):
                return []
            deltas = [{}]
        found = []
        for number, delta in enumerate(deltas):
            is_last = number == len(deltas) - 1
            choice = {**_choice(piece.index, piece.finish_reason if is_last else None), "delta": delta}
            items = (output.logprobs, output.token_ids) if number == 0 else ((), ())
            usage = usage_json(output.usage) if self._envelope.with_usage_in_each else None
            choice |= self._extras(*items)
            chunk = self._envelope.wrap(CHUNK, [choice], usage)
            if self._envelope.with_prompt_logprobs and output.prompt_logprobs and number == 0:
                chunk["prompt_logprobs"] = prompt_logprobs_json(
                    output.prompt_logprobs, self._envelope.token_text
                )
            found.append(event(chunk))
        return found

    def closing(self, usage: Usage) -> list[bytes]:
        """Usage, if asked for, and [DONE]."""
        return self._envelope.closing(CHUNK, usage)

    def _extras(self, logprobs: Sequence[TokenLogprob], token_ids: Sequence[int]) -> Json:
        found: Json = {}
        if self._envelope.with_logprobs:
            found["logprobs"] = {"content": [self._logprob(item) for item in logprobs]}
        if self._envelope.with_token_ids:
            found["token_ids"] = list(token_ids)
        return found

    def _logprob(self, item: TokenLogprob) -> Json:
        top = [self._entry(*one) for one in item.top]
        return {**self._entry(item.token_id, item.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> Json:
        name, raw = token_name(self._envelope.token_text, token_id)
        return {"token": name, "logprob": logprob, "bytes": raw}


def _choice(index: int, finish_reason: str | None) -> Json:
    return {"index": index, "logprobs": None, "finish_reason": finish_reason}


def _delta(delta: Any) -> Json:
    if isinstance(delta, TextDelta):
        return {"content": delta.text}
    function = {"arguments": delta.arguments}
    if not delta.name:
        return {"tool_calls": [{"index": delta.index, "function": function}]}
    named = {"id": delta.id, "type": "function", "function": {"name": delta.name, **function}}
    return {"tool_calls": [{"index": delta.index, **named}]}
