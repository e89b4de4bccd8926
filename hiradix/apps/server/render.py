"""Engine outputs as OpenAI JSON: both response shapes, stream chunks, log probabilities and usage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hiradix.apps.engine.api import Output, TokenLogprob, Usage

TokenText = Callable[[int], str]
Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


def usage_json(usage: Usage) -> Json:
    """Token counts with reused prompt tokens, in total and by the tier they came from."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "cached_tokens_details": {
            "device": usage.cached_device,
            "host": usage.cached_host,
            "storage": usage.cached_storage,
        },
    }


def event(record: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk of one answer repeats, and what the caller asked to see in it."""

    id: str
    created: int
    model: str
    token_text: TokenText
    with_logprobs: bool = False
    with_token_ids: bool = False

    def wrap(self, kind: str, choices: list[Json], usage: Json | None) -> Json:
        """A response or chunk of object type `kind`."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, "usage": usage}


def _token_name(text_of: TokenText, token_id: int) -> tuple[str, list[int] | None]:
    text = text_of(token_id)
    if not text or "\ufffd" in text:
        return f"token_id:{token_id}", None
    return text, list(text.encode())


def _extras(envelope: Envelope, output: Output) -> Json:
    return {"token_ids": list(output.token_ids)} if envelope.with_token_ids else {}


class ChatRenderer:
    """chat.completion and chat.completion.chunk."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, envelope: Envelope):
        self._envelope = envelope

    def opening(self) -> list[Json]:
        """The chunk that names the role."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]

    def choice(self, output: Output) -> Json:
        """New text as a delta."""
        return self._choice("delta", {"content": output.text} if output.text else {}, output)

    def message(self, output: Output) -> Json:
        """The whole message."""
        return self._choice("message", {"role": "assistant", "content": output.text}, output)

    def _choice(self, name: str, content: Json, output: Output) -> Json:
        logprobs = None
        if self._envelope.with_logprobs:
            logprobs = {"content": [self._logprob(item) for item in output.logprobs]}
        body = {"index": 0, name: content, "logprobs": logprobs, "finish_reason": output.finish_reason}
        return {**body, **_extras(self._envelope, output)}

    def _logprob(self, item: TokenLogprob) -> Json:
        return {
            **self._entry(item.token_id, item.logprob),
            "top_logprobs": [self._entry(*t) for t in item.top],
        }

    def _entry(self, token_id: int, logprob: float) -> Json:
        name, raw = _token_name(self._envelope.token_text, token_id)
        return {"token": name, "logprob": logprob, "bytes": raw}


class CompletionRenderer:
    """text_completion, whole and in chunks."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, envelope: Envelope):
        self._envelope = envelope
        self._offset = 0

    def opening(self) -> list[Json]:
        """Nothing comes before the first text."""
        return []

    def choice(self, output: Output) -> Json:
        """New text."""
        logprobs = self._logprobs(output) if self._envelope.with_logprobs else None
        body = {"index": 0, "text": output.text, "logprobs": logprobs, "finish_reason": output.finish_reason}
        return {**body, **_extras(self._envelope, output)}

    message = choice

    def _logprobs(self, output: Output) -> Json:
        text_of = self._envelope.token_text
        names = [_token_name(text_of, item.token_id)[0] for item in output.logprobs]
        offsets = []
        for item in output.logprobs:
            offsets.append(self._offset)
            self._offset += len(text_of(item.token_id))
        top = [{_token_name(text_of, t)[0]: value for t, value in item.top} for item in output.logprobs]
        values = [item.logprob for item in output.logprobs]
        return {"tokens": names, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


Renderer = ChatRenderer | CompletionRenderer
"""One response shape, of one answer. `opening`: choices sent before the first output. `choice`: that of one
stream chunk, with `chunk_kind`. `message`: that of a whole answer, with `kind`."""
