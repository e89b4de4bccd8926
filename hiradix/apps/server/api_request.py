"""The common form of requests and answers, which every dialect translates to and from; nothing here knows any
dialect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hiradix.apps.engine.api import (
    FINISH_STOP,
    FINISH_TOOL,
    ChatPrompt,
    Output,
    PromptWish,
    SamplingParams,
    Scope,
    TokenLogprob,
    Usage,
)
from hiradix.apps.server.tools import CallDelta, CallReader, Delta, TextDelta, ToolFormat

MOST_ANSWERS = 128  # of one request, n of each prompt


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The way an answer may call functions. form: how calls are written, by the model or a grammar; is_forced:
    it must call one; most_one: at most one."""

    form: ToolFormat
    is_forced: bool = False
    most_one: bool = False

    @property
    def sampling(self) -> dict[str, Any]:
        """Parameters by which the engine knows a call and shows it."""
        markers = ("",) if self.is_forced else self.form.markers
        return {"tool_markers": markers, **({"skip_special_tokens": False} if self.form.is_special else {})}

    def reader(self) -> CallReader:
        """A new reader, for one answer."""
        return CallReader(self.form, 1 if self.most_one else None)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form that an answer must match. field: the body's field that asks for it; make: its grammar, called
    beside the event loop."""

    field: str
    make: Callable[[], str]


@dataclass(frozen=True, slots=True)
class AskedWish:
    """A wish about a request's prompt. upto: whose common beginning with the prompt it is about; None: all."""

    wish: PromptWish
    upto: ChatPrompt | None = None


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One request, of any dialect.

    field: of the body, with the prompts; params.max_new_tokens counts where `limit` is one. form: what the
    answer must match. wishes: what it asks of the cache.
    """

    prompts: Sequence[str | Sequence[int] | ChatPrompt]
    field: str
    params: SamplingParams
    limit: int | None
    scope: Scope
    num_answers: int = 1
    tools: ToolUse | None = None
    form: AnswerForm | None = None
    wishes: Sequence[AskedWish] = ()
    add_special_tokens: bool = True
    rid: str | None = None
    is_streamed: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """One Output of answer number `index`, with what its text says: text and calls."""

    index: int
    output: Output
    deltas: tuple[Delta, ...]
    finish_reason: str | None


@dataclass(slots=True)
class MadeCall:
    """A tool call of an answer; arguments are JSON."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class WholeAnswer:
    """One whole answer."""

    index: int
    text: str = ""
    calls: list[MadeCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    matched_stop: str | None = None

    def add(self, piece: Piece) -> None:
        """The answer goes on."""
        output = piece.output
        for delta in piece.deltas:
            if isinstance(delta, TextDelta):
                self.text += delta.text
            elif delta.name:
                self.calls.append(MadeCall(delta.id, delta.name, delta.arguments))
            else:
                self.calls[delta.index].arguments += delta.arguments
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.matched_stop = piece.finish_reason, output.matched_stop


class PieceReader:
    """Outputs of one answer as pieces. tools: None where text is text."""

    def __init__(self, index: int, tools: ToolUse | None):
        self._index = index
        self._reader = None if tools is None else tools.reader()

    def read(self, output: Output) -> Piece:
        """The next piece."""
        if self._reader is None:
            deltas: list[Delta] = [TextDelta(output.text)] if output.text else []
            reason = FINISH_STOP if output.finish_reason == FINISH_TOOL else output.finish_reason
            return Piece(self._index, output, tuple(deltas), reason)
        deltas = self._reader.push(output.text)
        reason = output.finish_reason
        if reason is not None:
            deltas += self._reader.finish()
            if reason in (FINISH_STOP, FINISH_TOOL):
                reason = FINISH_TOOL if self._reader.num_calls else FINISH_STOP
        return Piece(self._index, output, _joined(deltas), reason)


def _joined(deltas: list[Delta]) -> tuple[Delta, ...]:
    """Neighbours of a kind as one."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            found[-1] = TextDelta(last.text + delta.text)
        elif isinstance(delta, CallDelta) and isinstance(last, CallDelta) and not delta.name:
            found[-1] = replace(last, arguments=last.arguments + delta.arguments)
        else:
            found.append(delta)
    return tuple(found)


class Tally:
    """Usage of a request with several prompts and answers: a prompt counts once, every answer's tokens do."""

    def __init__(self, num_answers: int):
        self._num_answers = num_answers
        self._by_answer: dict[int, Usage] = {}

    def note(self, piece: Piece) -> None:
        """The answer has used so much by now."""
        self._by_answer[piece.index] = piece.output.usage

    @property
    def usage(self) -> Usage:
        """The usage of all prompts and answers so far."""
        firsts = [one for index, one in self._by_answer.items() if index % self._num_answers == 0]
        return Usage(
            sum(one.prompt_tokens for one in firsts),
            sum(one.completion_tokens for one in self._by_answer.values()),
            sum(one.cached_device for one in firsts),
            sum(one.cached_host for one in firsts),
            sum(one.cached_storage for one in firsts),
            wishes=tuple(wish for one in self._by_answer.values() for wish in one.wishes),
        )
