"""Clients' cache controls as wishes of the cache: each dialect's fields as one record.

    cache_control            Anthropic's, also on parts of OpenAI's messages     a hold of what is before it
    prompt_cache_key         OpenAI's                                            the name of the session
    prompt_cache_retention   OpenAI's                                            24h: bring to storage
    hiradix                  ours                                                any wish about the prompt

None of them changes the prompt, and but for `hiradix`, whose fields are checked, none fails the request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hiradix.apps.engine.api import ChatPrompt, PromptWish
from hiradix.apps.server.api_request import AskedWish
from hiradix.apps.server.errors import ApiError
from hiradix.intents import COMMON, BadIntent, Selector
from hiradix.intents.http import MAX_OF_REQUEST, intent_of
from hiradix.tree import RadixKey

Json = dict[str, Any]
Wished = dict[str, Any] | list[dict[str, Any]] | None
"""The field `hiradix` of a body."""
FIELD: Final = "hiradix"
TTL_S: Final = {"5m": 300.0, "1h": 3600.0}
RETENTION_S: Final = 86400.0
MAX_NAME_CHARS: Final = 256
FRONT: Final = (-1, 0)


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A mark in a conversation. at: behind which part of which message, FRONT where it is before the first that
    is not the system's; None: at the end."""

    ttl_s: float
    at: tuple[int, int] | None = None


def ttl_of(control: Mapping[str, Any]) -> float:
    """Seconds that a mark asks for; those of an unknown `ttl` are the least."""
    ttl = control.get("ttl")
    return TTL_S.get(ttl if isinstance(ttl, str) else "", TTL_S["5m"])


def of_marks(
    marks: Sequence[CacheMark],
    messages: Sequence[Json],
    cut: Callable[[int, int], Sequence[Json]],
    make: Callable[[Sequence[Json]], ChatPrompt],
) -> list[AskedWish]:
    """Holds of what is before marks, which are in the prompt's order: of those that no later one holds as long.

    cut: the messages up to a place, as templates take them. make: a conversation of these, with the request's
    tools, as the prompt's is made.
    """
    found, longest = [], 0.0
    for mark in reversed(marks):
        if mark.ttl_s <= longest:
            continue
        longest = mark.ttl_s
        try:
            upto = None
            if mark.at is not None:
                upto = make(_front(messages) if mark.at == FRONT else cut(*mark.at))
        except ApiError as error:
            refused = {"state": "refused", "reason": f"its place is not known: {error.message}"}
            found.append(AskedWish(PromptWish("cache_control", answer=refused)))
        else:
            wish = PromptWish("cache_control", {"verb": "hold", "ttl_s": mark.ttl_s})
            found.append(AskedWish(wish, upto))
    return found[::-1]


def _front(messages: Sequence[Json]) -> list[Json]:
    """The system's messages at the beginning, and a first one that begins with another character."""
    head: list[Json] = []
    for message in messages:
        if message["role"] != "system":
            text = str(message.get("content") or "")
            return [*head, {"role": "user", "content": "*" if text[:1] == "#" else "#"}]
        head.append(message)
    return [*head, {"role": "user", "content": "#"}]


def session_of_key(key: str | None) -> str:
    """The session that a `prompt_cache_key` names; one that is too long, or no text, by its digest."""
    if not key:
        return ""
    data = key.encode("utf-8", "surrogatepass")
    is_name = len(key) <= MAX_NAME_CHARS and not any("\ud800" <= c <= "\udfff" for c in key)
    return key if is_name else hashlib.sha256(data).hexdigest()


def of_prompt_cache(key: str | None, retention: str | None, is_named: bool) -> list[AskedWish]:
    """The wishes of OpenAI's two fields. is_named: another field names the session, and goes before the key."""
    found = []
    if key:
        answer = {"state": "done", "reason": "it names the session"}
        if is_named:
            answer = {"state": "refused", "reason": "session_id or X-Session-Id names the session"}
        found.append(PromptWish("prompt_cache_key", answer=answer))
    if retention == "24h":
        body = {"verb": "bring", "target": "storage", "wait_s": 600.0}
        found.append(PromptWish("prompt_cache_retention", body, or_hold_s=RETENTION_S))
    elif retention and retention not in ("in_memory", "in-memory"):
        answer = {"state": "refused", "reason": "expected in_memory or 24h"}
        found.append(PromptWish("prompt_cache_retention", answer=answer))
    return [AskedWish(wish) for wish in found]


def of_field(given: Wished) -> list[AskedWish]:
    """The wishes of the field `hiradix`: one, or a list of them. ApiError names what is wrong."""
    wishes = [] if given is None else given if isinstance(given, list) else [given]
    if len(wishes) > MAX_OF_REQUEST:
        raise ApiError(f"{FIELD}: expected at most {MAX_OF_REQUEST} wishes", param=FIELD)
    any_prompt = Selector.prefix(RadixKey([]))
    for wish in wishes:
        try:
            intent_of(wish, COMMON, selector=any_prompt)
        except BadIntent as error:
            raise ApiError(f"{FIELD}.{error}", param=f"{FIELD}.{error.field}") from error
    return [AskedWish(PromptWish(FIELD, wish)) for wish in wishes]


def told(wishes: Sequence[Mapping[str, Any]]) -> Json:
    """The answers to a request's wishes, for its `usage`; nothing where it had none."""
    return {"hiradix_intents": [dict(wish) for wish in wishes]} if wishes else {}
