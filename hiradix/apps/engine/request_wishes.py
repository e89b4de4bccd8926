"""Wishes of requests about their own prompts: asked at their first token, answered at the last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from hiradix.apps.engine.api import PromptWish
from hiradix.apps.engine.request import Request
from hiradix.intents import ANY_SESSION, COMMON, BadIntent, Intent, Receipt, Selector, Verb
from hiradix.intents.http import intent_of
from hiradix.policy.admission_controller import session_name
from hiradix.prefix_cache import PrefixCache
from hiradix.tree import RadixKey

FORGET: Final = Verb.FORGET.value
NO_TENANT: Final = "forget is a tenant's: send a cache_salt, or a tenant's key"
NOT_LEARNED: Final = "the eviction policy learns nothing of sessions"


def owner_of(key: RadixKey) -> str:
    """The tenant who wishes what a request in this namespace does."""
    return key.space.tenant or COMMON


def series_of(key: RadixKey, session: str) -> str:
    """The series of the holds of a session, which is of a namespace, whatever the client calls it."""
    if not session:
        return ANY_SESSION
    return session_name(key.space.cache_salt or "", session, key.space.extra_key)


class RequestWishes:
    """Submits requests' wishes to one cache, and keeps what they were answered. Engine thread only."""

    def __init__(self, cache: PrefixCache):
        self._cache = cache
        self._answers: dict[str, list[tuple[str, Receipt | Mapping[str, Any]]]] = {}

    def begin(self, request: Request) -> None:
        """The prompt is computed: ask for all but forgets. Once for each request; O(prompt) where it wishes."""
        if request.wishes and request.rid not in self._answers:
            later = [wish for wish in request.wishes if wish.body.get("verb") != FORGET]
            self._answers[request.rid] = [(wish.asked_by, self._submit(request, wish)) for wish in later]

    def end(self, request: Request) -> tuple[Mapping[str, Any], ...]:
        """The request is answered and its pages are in the cache: ask for forgets, and what became of all."""
        if not (request.wishes or request.session_hint):
            return ()
        answers = self._answers.pop(request.rid, []) + self._forget(request)
        if request.session_hint is not None:
            answers.append((request.session_hint, self._hinted(request, request.session_hint)))
        return tuple({"field": field, **self._shown(found)} for field, found in answers)

    def drop(self, request: Request) -> None:
        """The request ends without an answer, its pages in the cache: ask for forgets. What else it asked for
        goes on."""
        self._answers.pop(request.rid, None)
        self._forget(request)

    def _forget(self, request: Request) -> list[tuple[str, Receipt | Mapping[str, Any]]]:
        """Ask for the forgets of a request that has ended, and return their answers."""
        forgets = [wish for wish in request.wishes if wish.body.get("verb") == FORGET]
        return [(wish.asked_by, self._submit(request, wish)) for wish in forgets]

    def end_session(self, key: RadixKey, session: str) -> int:
        """End the leases of a session that goes on no more, and return their number."""
        if not session:
            return 0
        return self._cache.cache.intents.end_series(owner_of(key), series_of(key, session))

    def _submit(self, request: Request, wish: PromptWish) -> Receipt | Mapping[str, Any]:
        if wish.answer is not None:
            return wish.answer
        try:
            return self._cache.submit(self._intent(request, wish))
        except BadIntent as error:
            return {"state": "refused", "reason": str(error)}

    def _intent(self, request: Request, wish: PromptWish) -> Intent:
        body = dict(wish.body)
        is_forget = body.get("verb") == FORGET
        tokens = (
            request.tokens(0, request.num_tokens)
            if is_forget
            else request.origin_input_ids[: wish.num_tokens]
        )
        key = RadixKey(tokens, request.extra_key, cache_salt=request.cache_salt)
        owner = owner_of(key)
        if is_forget and owner == COMMON:
            raise BadIntent("verb", NO_TENANT)
        if wish.or_hold_s and self._cache.storage_name is None:
            body = {"verb": Verb.HOLD.value, "ttl_s": wish.or_hold_s}
        if body.get("verb") == Verb.HOLD.value and body.get("tiers") is None:
            body["tiers"] = "host" if self._cache.has_host else "device"
        intent = intent_of(body, owner, selector=Selector.prefix(key))
        if intent.verb is not Verb.HOLD:
            return intent
        return replace(intent, series=series_of(key, request.session_id))

    def _hinted(self, request: Request, hint: str) -> Mapping[str, Any]:
        """The answer to `end_of_session` or `keep_alive`, which the cache was told with the request's end."""
        is_told = self._cache.cache.learner is not None
        answer: dict[str, Any] = {"state": "done" if is_told else "refused"}
        if not is_told:
            answer["reason"] = NOT_LEARNED
        if hint == "end_of_session":
            key = RadixKey([], request.extra_key, cache_salt=request.cache_salt)
            ended = self.end_session(key, request.session_id)
            answer |= {"state": "done", "released": ended} if ended else {}
        return answer

    def _shown(self, found: Receipt | Mapping[str, Any]) -> Mapping[str, Any]:
        """An answer in the form of usage: a receipt as of now."""
        if not isinstance(found, Receipt):
            return found
        receipt = self._cache.intent(found.id) or found
        intent = receipt.intent
        shown: dict[str, Any] = {
            "id": receipt.id,
            "verb": intent.verb.value,
            "where": intent.target or "+".join(intent.tiers),
            "state": receipt.state.value,
        }
        if intent.verb is Verb.LOCATE:
            known = {tier: one.tokens for tier, one in receipt.found.items() if one.is_known}
            return shown | {"found": known} | ({"reason": receipt.reason} if receipt.reason else {})
        shown |= {"tokens": receipt.done.tokens, "of_tokens": receipt.total.tokens}
        if intent.verb is Verb.HOLD:
            shown["remaining_s"] = round(receipt.remaining_s, 1)
        more = {"clipped": receipt.clipped, "reason": receipt.reason, "saved_tokens": receipt.saved_tokens}
        return shown | {name: value for name, value in more.items() if value}
