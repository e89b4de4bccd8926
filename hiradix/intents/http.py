"""Wishes over HTTP: paths and bodies as intents, receipts as JSON. Every face has these, whoever listens.

    POST    /hicache/intents                  a wish: {"verb": VERB, "selector": {...}, ...}
    POST    /hicache/prefix/VERB              the same without "verb": locate, hold, forget, bring
    GET     /hicache/intents                  all receipts that are known; of a tenant, his
    GET     /hicache/intents/ID               one
    DELETE  /hicache/intents/ID               end it: a lease, or what runs
    GET     /hicache/tenants                  who has how much

A body's fields are those of `Intent`. Its selector has one of `tokens`, `text`, `messages`, `session`, `tenant`
and `everything`, and beside the first three `extra_key` and `cache_salt`. Who asks is the listener's to say, by
the key that came: never the body's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hiradix.errors import BadNamespace
from hiradix.intents.records import (
    BRING_WAIT_S,
    MAX_NAME_CHARS,
    MAX_SELECTED_CHARS,
    OPERATOR,
    TIER_NAMES,
    Amount,
    BadIntent,
    Intent,
    IntentState,
    Receipt,
    Selector,
    TenantUse,
    Verb,
)
from hiradix.tree import RadixKey

INTENTS: Final = "/hicache/intents"
PREFIX: Final = "/hicache/prefix/"
TENANTS: Final = "/hicache/tenants"
MAX_TOKENS: Final = 1 << 20  # of a prefix that is sent
MAX_TOKEN: Final = 2**63 - 1
_ONE: Final = re.compile(re.escape(INTENTS) + r"/([0-9]{1,18})")
_PREFIXES: Final = ("tokens", "text", "messages")
_SELECTORS: Final = (*_PREFIXES, "session", "tenant", "everything")
_NUMBERS: Final = ("ttl_s", "wait_s")
_FLAGS: Final = ("is_whole", "is_move")
FIELDS: Final = ("verb", "selector", "tiers", *_NUMBERS, "max_bytes", "target", *_FLAGS)
_TIERS: Final = {
    Verb.LOCATE: ("device", "host"),
    Verb.HOLD: ("host",),
    Verb.FORGET: TIER_NAMES,
    Verb.BRING: (),
}
MAX_OF_REQUEST: Final = 8  # wishes in a field of one request

IntentBody = bytes | str | Mapping[str, Any]
"""A body of JSON, or the object that was read from one."""
Encode = Callable[[str, Any], list[int]]
"""The tokens of `text` or `messages`, by a listener that has a tokenizer. ValueError: it is none."""
MakeKey = Callable[[list[int], "str | None", "str | None"], RadixKey]
"""The key of tokens, an extra key and a salt as the listener's engine names its own."""

Ask = Callable[[Callable[[Any], Any]], Any]
"""Runs a function of the cache's wishes, `hiradix.cache.intents.table.Intents`, where the scheduler has its
turn, and gives what it returns. TimeoutError: it had none in time."""


@dataclass(frozen=True)
class IntentReply:
    """A status and a body of JSON."""

    status: int
    body: Mapping[str, Any]


def plain_key(tokens: list[int], extra_key: str | None, cache_salt: str | None) -> RadixKey:
    """The key of tokens in a namespace that goes by what the client says."""
    return RadixKey(tokens, extra_key, cache_salt=cache_salt)


class IntentApi:
    """Answers requests to the paths above. May be called on any thread: `ask` brings each to the scheduler's."""

    def __init__(self, ask: Ask, make_key: MakeKey = plain_key, encode: Encode | None = None):
        self._ask = ask
        self._make_key = make_key
        self._encode = encode

    @staticmethod
    def has(path: str) -> bool:
        """Whether `path`, without its query, is one of these."""
        return path in (INTENTS, TENANTS) or path.startswith((INTENTS + "/", PREFIX))

    def answer(self, method: str, path: str, body: IntentBody = b"", asked_by: str = OPERATOR) -> IntentReply:
        """Never raises for what was asked: a bad field is 400, an unknown id or path 404, a wish that is refused
        409 with its receipt, and 503 says that the scheduler had no turn in time."""
        try:
            return self._answer(method, path, body, asked_by)
        except BadIntent as error:
            return IntentReply(
                404 if error.field == "id" else 400, {"message": str(error), "field": error.field}
            )
        except TimeoutError as error:
            return IntentReply(503, {"message": str(error)})

    def _answer(self, method: str, path: str, body: IntentBody, asked_by: str) -> IntentReply:
        one = _ONE.fullmatch(path)
        if one is not None:
            return self._one(method, int(one[1]), asked_by)
        if path == TENANTS:
            return self._tenants(asked_by) if method == "GET" else _wrong(method, "GET")
        if path == INTENTS and method == "GET":
            own = None if asked_by == OPERATOR else asked_by
            found = self._ask(lambda wishes: wishes.receipts(own))
            return IntentReply(200, {"intents": [receipt_as_json(receipt) for receipt in found]})
        verb = path.removeprefix(PREFIX) if path.startswith(PREFIX) else None
        if path != INTENTS and verb not in [known.value for known in Verb]:
            return IntentReply(404, {"message": f"there is no such path; a verb is one of {_known(Verb)}"})
        if method != "POST":
            return _wrong(method, "POST" if verb else "GET, POST")
        intent = intent_of(body, asked_by, verb, self._make_key, self._encode)
        return answer_of(self._ask(lambda wishes: wishes.submit(intent)))

    def _one(self, method: str, intent_id: int, asked_by: str) -> IntentReply:
        if method not in ("GET", "DELETE"):
            return _wrong(method, "GET, DELETE")

        def answer(wishes: Any) -> Receipt:
            found: Receipt | None = wishes.receipt(intent_id)
            if found is None or asked_by not in (OPERATOR, found.intent.asked_by):
                raise BadIntent("id", f"no wish {intent_id} is known; those that ended are forgotten in time")
            ended: Receipt = wishes.cancel(intent_id, asked_by) if method == "DELETE" else found
            return ended

        return IntentReply(200, receipt_as_json(self._ask(answer)))

    def _tenants(self, asked_by: str) -> IntentReply:
        only = None if asked_by == OPERATOR else asked_by
        rows = self._ask(lambda wishes: wishes.tenants(only))
        return IntentReply(200, {"tenants": [tenant_as_json(row) for row in rows]})


def _wrong(method: str, allowed: str) -> IntentReply:
    return IntentReply(405, {"message": f"{method:.16} is not allowed here, but {allowed}"})


def answer_of(receipt: Receipt) -> IntentReply:
    """202 while it is under way, 200 where it has ended, 409 where it is refused."""
    if receipt.state is IntentState.REFUSED:
        return IntentReply(409, receipt_as_json(receipt))
    return IntentReply(200 if receipt.state.is_end else 202, receipt_as_json(receipt))


# -- bodies ------------------------------------------------------------------------------


def intent_of(
    body: IntentBody,
    asked_by: str,
    verb: str | None = None,
    make_key: MakeKey = plain_key,
    encode: Encode | None = None,
    selector: Selector | None = None,
) -> Intent:
    """The wish in a body, or in an object read from one. BadIntent names the field.

    verb: what a path says. selector: whose pages where the body has none to say, as in a field of a request.

    >>> wish = intent_of('{"selector": {"tokens": [1, 2, 3]}, "ttl_s": 60}', "salt:alice", "hold")
    >>> wish.verb, wish.tiers, wish.ttl_s, wish.asked_by
    (<Verb.HOLD: 'hold'>, ('host',), 60.0, 'salt:alice')
    >>> intent_of('{"verb": "hold", "ttl": 60}', "")
    Traceback (most recent call last):
    hiradix.intents.records.BadIntent: ttl: not known here; known: verb, selector, tiers, ttl_s, wait_s, max_bytes, target, is_whole, is_move
    """  # noqa: E501
    values = _object(body)
    for name in values:
        if name not in FIELDS:
            raise BadIntent(_plain(name), f"not known here; known: {', '.join(FIELDS)}")
    named = values.get("verb", verb)
    if verb is not None and named != verb:
        raise BadIntent("verb", f"the path says {verb}")
    if not isinstance(named, str) or named not in [known.value for known in Verb]:
        raise BadIntent("verb", f"expected one of {_known(Verb)}")
    what = Verb(named)
    given: dict[str, Any] = {"tiers": _tiers(values.get("tiers"), what)}
    if what is Verb.BRING:
        given["wait_s"] = BRING_WAIT_S
    given |= {name: _seconds(name, values[name]) for name in _NUMBERS if values.get(name) is not None}
    given |= {name: _flag(name, values[name]) for name in _FLAGS if name in values}
    if values.get("max_bytes") is not None:
        given["max_bytes"] = _count("max_bytes", values["max_bytes"])
    if values.get("target") is not None:
        given["target"] = _text("target", values["target"])
    if selector is None:
        selector = selector_of(values.get("selector"), make_key, encode)
    elif "selector" in values:
        raise BadIntent("selector", "a request's wishes are about its own prompt and answer")
    return Intent(what, selector, asked_by=asked_by, **given)


def selector_of(given: Any, make_key: MakeKey = plain_key, encode: Encode | None = None) -> Selector:
    """The selector in a body's object. BadIntent names the field."""
    if not isinstance(given, Mapping):
        raise BadIntent("selector", f"expected an object with one of {', '.join(_SELECTORS)}")
    for name in given:
        if name not in (*_SELECTORS, "extra_key", "cache_salt"):
            raise BadIntent(f"selector.{_plain(name)}", f"not known here; known: {', '.join(_SELECTORS)}")
    kinds = [name for name in _SELECTORS if given.get(name) is not None]
    if len(kinds) != 1:
        raise BadIntent("selector", f"expected one of {', '.join(_SELECTORS)}, got {len(kinds)}")
    (kind,) = kinds
    value, spaces = given[kind], (given.get("extra_key"), given.get("cache_salt"))
    if kind in _PREFIXES:
        return Selector.prefix(_key(make_key, _tokens(kind, value, encode), *spaces))
    if kind == "everything":
        if value is not True or spaces != (None, None):
            raise BadIntent("selector.everything", "expected true, and nothing beside it")
        return Selector.everything()
    name = _text(f"selector.{kind}", value, MAX_SELECTED_CHARS)
    if kind == "tenant":
        if spaces != (None, None):
            raise BadIntent("selector.tenant", "a tenant is named by salt:SALT, key:KEY or nothing, alone")
        return Selector.tenant_of(name)
    return Selector.session(name, _key(make_key, [], *spaces).space.tenant)


def _key(make_key: MakeKey, tokens: list[int], extra_key: Any, cache_salt: Any) -> RadixKey:
    try:
        return make_key(tokens, extra_key, cache_salt)
    except BadNamespace as error:
        raise BadIntent("selector", str(error)) from error


def _object(body: IntentBody) -> Mapping[str, Any]:
    if isinstance(body, Mapping):
        return body
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise BadIntent("body", "it is no JSON") from None
    if not isinstance(values, dict):
        raise BadIntent("body", "expected an object")
    return values


def _tokens(kind: str, value: Any, encode: Encode | None) -> list[int]:
    field = f"selector.{kind}"
    if kind != "tokens":
        if encode is None:
            raise BadIntent(field, "there is no tokenizer here: send tokens")
        try:
            value = encode(kind, value)
        except ValueError as error:
            raise BadIntent(field, f"{error!s:.200}") from error
    if not isinstance(value, list) or len(value) > MAX_TOKENS:
        raise BadIntent(field, f"expected a list of at most {MAX_TOKENS} token ids")
    for token in value:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN:
            raise BadIntent(field, f"expected token ids, got {token!r:.40}")
    return value


def _tiers(given: Any, verb: Verb) -> tuple[str, ...]:
    if given is None:
        return _TIERS[verb]
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list) or len(given) > len(TIER_NAMES):
        raise BadIntent("tiers", f"expected a list of {', '.join(TIER_NAMES)}")
    return tuple(_text("tiers", tier) for tier in given)


def _seconds(name: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or abs(given) > 1e12:
        raise BadIntent(name, f"expected seconds, got {given!r:.40}")
    return float(given)


def _count(name: str, given: Any) -> int:
    if type(given) is not int or abs(given) > MAX_TOKEN:
        raise BadIntent(name, f"expected a number of bytes, got {given!r:.40}")
    return given


def _flag(name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise BadIntent(name, f"expected true or false, got {given!r:.40}")
    return given


def _text(name: str, given: Any, most: int = MAX_NAME_CHARS) -> str:
    if not isinstance(given, str) or len(given) > most:
        raise BadIntent(name, f"expected a text of at most {most} characters")
    if any("\ud800" <= char <= "\udfff" for char in given):  # JSON carries it, and no answer can
        raise BadIntent(name, "expected a text without half characters")
    return given


def _plain(name: str) -> str:
    """A field's name as it is shown."""
    return f"{name:.64}".encode("ascii", "backslashreplace").decode()


def _known(verbs: Any) -> str:
    return ", ".join(verb.value for verb in verbs)


def answers_of_request(
    given: Any, selector: Selector, submit: Callable[[Intent], Receipt]
) -> list[dict[str, Any]]:
    """Submit the wishes in a field of a request, about the request's own prompt, and return their answers.

    given: an object as of a body, without a selector, or a list of them.

    They are its tenant's: a request in no tenant's namespace has none, as nobody would answer for them. To
    forget is not among them, but for the endpoints.
    """
    wishes = given if isinstance(given, list) else [given]
    if len(wishes) > MAX_OF_REQUEST:
        return [{"message": f"expected at most {MAX_OF_REQUEST} wishes", "field": "wishes"}]
    if wishes and not selector.tenant:
        return [
            {"message": "wishes of a request are its tenant's: it has no cache_salt", "field": "cache_salt"}
        ]
    answers = []
    for wish in wishes:
        try:
            if not isinstance(wish, Mapping):
                raise BadIntent("wishes", "expected objects")
            intent = intent_of(wish, selector.tenant, selector=selector)
            if intent.verb is Verb.FORGET:
                raise BadIntent("verb", "forget is of the endpoints, not of a request")
            answers.append(receipt_as_json(submit(intent)))
        except BadIntent as error:
            answers.append({"message": str(error), "field": error.field})
    return answers


# -- answers -----------------------------------------------------------------------------


def receipt_as_json(receipt: Receipt) -> dict[str, Any]:
    """A receipt as the paths above answer it. What was asked for goes by what it selects, not by tokens."""
    intent = receipt.intent
    return {
        "id": receipt.id,
        "verb": intent.verb.value,
        "selector": str(intent.selector),
        "tiers": list(intent.tiers),
        "target": intent.target,
        "asked_by": intent.asked_by,
        "state": receipt.state.value,
        "is_end": receipt.state.is_end,
        "done": _amount(receipt.done),
        "total": _amount(receipt.total),
        "clipped": receipt.clipped,
        "reason": receipt.reason,
        "remaining_s": receipt.remaining_s,
        "found": {
            tier: {
                "tokens": found.tokens,
                "by_component": dict(found.by_component),
                "is_known": found.is_known,
            }
            for tier, found in receipt.found.items()
        },
        "by_tier": {tier: _amount(amount) for tier, amount in receipt.by_tier.items()},
        "saved_tokens": receipt.saved_tokens,
    }


def tenant_as_json(row: TenantUse) -> dict[str, Any]:
    """A row of the ledger."""
    return {**vars(row), "held_bytes": dict(row.held_bytes)}


def _amount(amount: Amount) -> dict[str, int]:
    return {"pages": amount.pages, "tokens": amount.tokens, "bytes": amount.bytes}
