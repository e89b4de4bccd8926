"""Wishes about the cache over HTTP: `hiradix.intents.http` behind the admin key, or a tenant's for what is his.

Text and messages of a selector become tokens here, beside the event loop; a session's name becomes the engine's,
and a tenant's namespaces are put in. The rest is checked where it is carried out, by each rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, Literal

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from hiradix.apps.engine.api import ChatPrompt
from hiradix.apps.server import audit
from hiradix.apps.server.answering import Answering
from hiradix.apps.server.auth import caller_of
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.intake import received
from hiradix.apps.server.json_text import parse
from hiradix.apps.server.messages import Messages, plain_messages
from hiradix.apps.server.schema import (
    MAX_ERRORS,
    MAX_SESSION_CHARS,
    TENANT_SALT,
    Owner,
    StrictBody,
    first_error,
    namespace_of,
)
from hiradix.apps.server.service import Service
from hiradix.intents.http import INTENTS, PREFIX, TENANTS, IntentApi, IntentBody, IntentReply
from hiradix.intents.records import OPERATOR
from hiradix.policy.admission_controller import session_name
from hiradix.tree import RadixKey

MAX_BODY_BYTES: Final = 16 << 20  # a prefix of a million tokens
SPACED: Final = ("tokens", "text", "messages", "session")  # selectors within a namespace


class SelectorMessages(StrictBody):
    """`messages` of a selector, as a chat has them."""

    messages: Messages


class SelectorBody(StrictBody):
    """Whose pages: one of the first six."""

    tokens: list[int] | None = None
    text: str | None = None
    messages: Messages | None = None
    session: str | None = None
    tenant: str | None = None
    everything: Literal[True] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None


class WishBody(StrictBody):
    """A wish about the cache, for the schema of the endpoints; `hiradix.intents.http` reads it."""

    verb: Literal["locate", "hold", "forget", "bring"] | None = None
    selector: SelectorBody
    tiers: list[Literal["device", "host", "storage"]] | None = None
    ttl_s: float | None = None
    wait_s: float | None = None
    max_bytes: int | None = None
    target: str | None = None
    is_whole: bool = False
    is_move: bool = False


class IntentEndpoints:
    """Paths and bodies are those of `hiradix.intents.http`; who asks is the operator, or the key's tenant."""

    def __init__(self, service: Service, answering: Answering):
        self._service = service
        self._answering = answering
        self.router = APIRouter()
        for path in (INTENTS, INTENTS + "/{rest:path}", PREFIX + "{rest:path}", TENANTS):
            self.router.add_api_route(path, self.answer, methods=["GET", "POST", "DELETE"])

    async def answer(self, request: Request) -> Response:
        """Any method on any of the paths."""
        path = request.url.path
        if not IntentApi.has(path):
            raise ApiError(f"{request.method} {path}: Not Found", status=404)
        owner = Owner(caller_of(request.scope).tenant)
        try:
            body: IntentBody = await self._body(request, owner) if request.method == "POST" else ""
            answer = await self._service.answer_intent(request.method, path, body, _asked_by(owner))
        except ApiError as error:
            if error.status != 400:
                raise
            answer = IntentReply(400, {"message": error.message, "field": error.param})
        if request.method != "GET":
            said = answer.body.get("state") or answer.body.get("message", "")
            audit.act(request.scope, f"{request.method} {path}", audit.plain(f"{answer.status} {said}"))
        return JSONResponse(dict(answer.body), answer.status)

    async def _body(self, request: Request, owner: Owner) -> IntentBody:
        """The body with tokens in place of text, the engine's name of a session in place of the client's, and a
        tenant's own namespaces."""
        with self._answering.intake.body() as share:
            data = await received(request, MAX_BODY_BYTES, share)
            body = await share.work(partial(_object, data), len(data))
            selector = body.get("selector")
            if isinstance(selector, dict):
                for field in ("text", "messages"):
                    if selector.get(field) is not None and selector.get("tokens") is None:
                        make = partial(self._prompt, field, selector.pop(field))
                        prompt, where = await share.work(make, len(data)), f"selector.{field}"
                        selector["tokens"] = list(await self._answering.token_ids(prompt, where, self._most))
                self._prepare(selector, owner)
            return body

    @property
    def _most(self) -> int:
        """The most tokens of a prefix: no longer one is cached, and the engine's thread reads them."""
        return self._service.context_length

    def _prepare(self, selector: dict[str, Any], owner: Owner) -> None:
        tokens = selector.get("tokens")
        if isinstance(tokens, list) and len(tokens) > self._most:
            raise ApiError(f"selector.tokens: more than the context's {self._most}", param="selector.tokens")
        if owner.tenant is not None and any(selector.get(kind) is not None for kind in SPACED):
            given = [selector.get(name) for name in ("extra_key", "cache_salt")]
            for name, value in zip(("extra_key", "cache_salt"), given, strict=True):
                if value is not None and not isinstance(value, str):
                    raise ApiError(f"selector.{name}: expected a text", param=f"selector.{name}")
            selector["extra_key"], selector["cache_salt"] = namespace_of(owner, *given)
        session = selector.get("session")
        if isinstance(session, str) and session:
            if len(session) > MAX_SESSION_CHARS:
                why = f"selector.session: longer than {MAX_SESSION_CHARS} characters"
                raise ApiError(why, param="selector.session")
            salt, adapter = selector.get("cache_salt"), selector.get("extra_key")
            selector["session"] = session_name(str(salt or ""), session, adapter)

    def _prompt(self, field: str, given: Any) -> str | ChatPrompt:
        """The text or the conversation in a selector. ApiError."""
        if field == "text":
            if not isinstance(given, str):
                raise ApiError("selector.text: expected a text", param="selector.text")
            return given
        try:
            messages = SelectorMessages.model_validate({"messages": given}).messages
            return self._answering.conversation(plain_messages(messages))
        except ValidationError as error:
            if (num_errors := error.error_count()) > MAX_ERRORS:  # to list them would take seconds
                why = f"selector.messages: {num_errors} values are wrong"
                raise ApiError(why, param="selector.messages") from error
            name, message = first_error(error)
            raise ApiError(f"selector.{message}", param=f"selector.{name}") from error
        except ApiError as error:
            raise ApiError(f"selector.{error.message}", param=f"selector.{error.param}") from error


def _object(data: bytes) -> dict[str, Any]:
    """The object that is in a body. ApiError."""
    try:
        body = parse(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"body: is not valid JSON: {error}", param="body") from error
    if not isinstance(body, dict):
        raise ApiError("body: expected an object", param="body")
    return body


def _asked_by(owner: Owner) -> str:
    """Who asks, as the cache names tenants."""
    if owner.tenant is None:
        return OPERATOR
    return RadixKey([], cache_salt=TENANT_SALT + owner.tenant).space.tenant
