"""Wishes about the cache over HTTP: `hiradix.intents.http` behind the admin key.

Text and messages of a selector become tokens here, beside the event loop; a session's name becomes the engine's.
The rest is checked where it is carried out, by each rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from hiradix.apps.server import audit
from hiradix.apps.server.answering import Answering
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.intake import received
from hiradix.apps.server.service import Service
from hiradix.intents.http import INTENTS, PREFIX, TENANTS, IntentApi, IntentBody
from hiradix.intents.records import OPERATOR
from hiradix.policy.admission_controller import session_name

MAX_BODY_BYTES: Final = 16 << 20  # a prefix of a million tokens


class IntentEndpoints:
    """Paths and bodies are those of `hiradix.intents.http`; who asks is the operator."""

    def __init__(self, service: Service, answering: Answering):
        self._service = service
        self._answering = answering
        self.router = APIRouter()
        for path in (INTENTS, INTENTS + "/{rest:path}", PREFIX + "{rest:path}", TENANTS):
            self.router.add_api_route(path, self.answer, methods=["GET", "POST", "DELETE"])

    async def answer(self, request: Request) -> Response:
        """Any method on any of the paths."""
        path = request.url.path
        body: IntentBody = ""
        if not IntentApi.has(path):
            raise ApiError(f"{request.method} {path}: Not Found", status=404)
        if request.method == "POST":
            body = await self._body(request)
        answer = await self._service.answer_intent(request.method, path, body, OPERATOR)
        if request.method != "GET":
            said = answer.body.get("state") or answer.body.get("message", "")
            audit.act(request.scope, f"{request.method} {path}", audit.plain(f"{answer.status} {said}"))
        return JSONResponse(dict(answer.body), answer.status)

    async def _body(self, request: Request) -> IntentBody:
        """The body with tokens in place of text, and the engine's name of a session in place of the client's.
        What is no object stays as it came, to be refused as what it is."""
        with self._answering.intake.body() as share:
            data = await received(request, MAX_BODY_BYTES, share)
            body = await share.work(partial(_object, data), len(data))
            if body is None:
                return data.decode(errors="replace")
            selector = body.get("selector")
            if isinstance(selector, dict):
                await self._as_the_engine_has_it(selector)
            return body

    async def _as_the_engine_has_it(self, selector: dict[str, Any]) -> None:
        for field in ("text", "messages"):
            if selector.get(field) is not None and selector.get("tokens") is None:
                selector["tokens"] = await self._tokens(field, selector.pop(field))
        session = selector.get("session")
        if isinstance(session, str) and session:
            selector["session"] = session_name(
                str(selector.get("cache_salt") or ""), session, selector.get("extra_key")
            )

    async def _tokens(self, field: str, given: Any) -> list[int]:
        where = f"selector.{field}"
        if field == "text":
            if not isinstance(given, str):
                raise ApiError(f"{where}: expected a text", param=where)
            return list(await self._answering.token_ids(given, where, None))
        if not isinstance(given, list) or not all(isinstance(message, Mapping) for message in given):
            raise ApiError(f"{where}: expected a list of messages", param=where)
        conversation = self._answering.conversation([dict(message) for message in given])
        return list(await self._answering.token_ids(conversation, where, None))


def _object(data: bytes) -> dict[str, Any] | None:
    """The object that is in a body, None where there is none."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None
