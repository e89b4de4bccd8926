"""The parts of answers that OpenAI's dialects share: usage, events, names of tokens, the head of every chunk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hiradix.apps.engine.api import Output, TokenLogprob, Usage
from hiradix.apps.server.api_request import Piece, WholeAnswer
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.wishes import told

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
        "cached_tokens_details": tiers_json(usage),
        **told(usage.wishes),
    }


def tiers_json(usage: Usage) -> Json:
    """Reused prompt tokens by the tier they came from."""
    return {"device": usage.cached_device, "host": usage.cached_host, "storage": usage.cached_storage}


def event(record: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that every chunk of one answer repeats, and the extras that the caller asked for."""

    id: str
    created: int
    model: str
    token_text: TokenText
    with_logprobs: bool = False
    with_token_ids: bool = False
    with_prompt_logprobs: bool = False
    with_usage: bool = False
    with_usage_in_each: bool = False

    def is_shown(self, output: Output) -> bool:
        """Whether an output without a text is shown."""
        has_scores = self.with_prompt_logprobs and bool(output.prompt_logprobs)
        return self.with_logprobs or self.with_token_ids or has_scores

    def wrap(self, kind: str, choices: list[Json], usage: Json | None) -> Json:
        """A response or chunk of object type `kind`."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, "usage": usage}

    def closing(self, kind: str, usage: Usage) -> list[bytes]:
        """Events behind the last piece: the usage, if asked for, and [DONE]."""
        last = [event(self.wrap(kind, [], usage_json(usage)))] if self.with_usage else []
        return [*last, DONE]


def token_name(text_of: TokenText, token_id: int) -> tuple[str, list[int] | None]:
    """A token's text and its bytes; `token_id:N` and None where it holds part of a character."""
    text = text_of(token_id)
    if not text or "\ufffd" in text:
        return f"token_id:{token_id}", None
    return text, list(text.encode())


def prompt_logprobs_json(items: Sequence[TokenLogprob], text_of: TokenText) -> list[Json | None]:
    """vLLM's form: of each token of the prompt its own entry and the likeliest, None for the first."""
    return [None, *(_ranked(item, text_of) for item in items)]


def _ranked(item: TokenLogprob, text_of: TokenText) -> Json:
    entries = [(token, value, rank) for rank, (token, value) in enumerate(item.top, 1)]
    if all(token != item.token_id for token, _, _ in entries):
        entries.insert(0, (item.token_id, item.logprob, item.rank))
    return {
        str(token): {"logprob": value, "rank": rank, "decoded_token": text_of(token)}
        for token, value, rank in entries
    }


class Renderer:
    """One shape of answers, of one request; each dialect has one. Events are as they are sent."""

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> Json:
        """The body of an answer that is not streamed."""
        raise NotImplementedError

    def opening(self) -> list[bytes]:
        """Events before the first output."""
        return []

    def events(self, piece: Piece) -> list[bytes]:
        """Events of one piece; none where it shows nothing."""
        raise NotImplementedError

    def closing(self, usage: Usage) -> list[bytes]:
        """Events behind the last piece."""
        return [DONE]

    def failure(self, error: ApiError) -> list[bytes]:
        """Events that end a stream which failed."""
        return [event(error.body()), DONE]
