"""Wishes about the cache over HTTP: `hiradix.intents.http` behind the admin key.

Text and messages of a selector become tokens here, beside the event loop; a session's name becomes the engine's.
The rest is parsed where it is carried out, by each rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from hiradix.apps.server import audit
from hiradix.apps.server.answering import Answering
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.service import Service
from hiradix.intents.http import INTENTS, PREFIX, TENANTS, IntentApi
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
        path, body = request.url.path, b""
        if not IntentApi.has(path):
            raise ApiError(f"{request.method} {path}: Not Found", status=404)
        if request.method == "POST":
            body = await self._body(request)
        answer = await self._service.answer_intent(request.method, path, body.decode(), OPERATOR)
        if request.method != "GET":
            said = answer.body.get("state") or answer.body.get("message", "")
            audit.act(request.scope, f"{request.method} {path}", audit.plain(f"{answer.status} {said}"))
        return JSONResponse(dict(answer.body), answer.status)

    async def _body(self, request: Request) -> bytes:
        """The body with tokens in place of text, and the engine's name of a session in place of the client's."""
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > MAX_BODY_BYTES:
                raise ApiError(f"body: over {MAX_BODY_BYTES} bytes", status=413)
        try:
            body = json.loads(bytes(data))
        except (ValueError, RecursionError):
            return b"?"  # which is refused as what it is
        selector = body.get("selector") if isinstance(body, dict) else None
        if not isinstance(selector, dict):
            return bytes(data)
        for field in ("text", "messages"):
            if selector.get(field) is not None and selector.get("tokens") is None:
                tokens = await self._tokens(field, selector.pop(field))
                selector["tokens"] = tokens
        session = selector.get("session")
        if isinstance(session, str) and session:
            selector["session"] = session_name(
                str(selector.get("cache_salt") or ""), session, selector.get("extra_key")
            )
        return json.dumps(body).encode()

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
