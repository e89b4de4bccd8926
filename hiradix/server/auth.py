"""Who may call what: three levels, bearer keys compared in constant time, one table of paths."""

from __future__ import annotations

import enum
import hmac
from dataclasses import dataclass, field

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from hiradix.browsers import Allowed
from hiradix.server.audit import RefusedKeys

NO_ADMIN_KEY = (
    "This endpoint requires admin API key, but this server was started without one (admin-api-key). "
    "Restart with --admin-api-key to enable."
)


class Level(enum.Enum):
    """What a path asks of the caller."""

    NORMAL = "normal"  # the api key, where one is set
    ADMIN_OPTIONAL = "admin_optional"  # the admin key, else the api key, else nothing
    ADMIN_REQUIRED = "admin_required"  # the admin key; off (400) on a server without one


LEVELS = {
    "/flush_cache": Level.ADMIN_OPTIONAL,
    "/hicache/storage-backend": Level.ADMIN_REQUIRED,
    "/hicache/storage-backend/clear": Level.ADMIN_REQUIRED,
    "/clear_hicache_storage_backend": Level.ADMIN_REQUIRED,
}
OPEN_PREFIXES = ("/health", "/ready", "/metrics")
PROBES = ("/health", "/ready")
"""Say no more than that somebody listens: load balancers ask for them by any name."""
ANY_PAGE = Allowed()
_WHY = {401: "a wrong key, or none", 400: "it is off without an admin key", 403: "sent by another's web page"}


@dataclass(frozen=True)
class Keys:
    """The server's two keys; never shown in a repr."""

    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)


def _matches(authorization: bytes, key: str) -> bool:
    scheme, _, token = authorization.partition(b" ")
    same = hmac.compare_digest(token.strip(), key.encode())
    return scheme.lower() == b"bearer" and same


def check(keys: Keys, scope: Scope, pages: Allowed = ANY_PAGE) -> JSONResponse | None:
    """None when the request may pass, else the answer that refuses it.

    pages: whose web pages may have sent it, where it has no key: pages of others have none.
    """
    path = scope["path"]
    if path in PROBES:
        return None
    if scope["method"] == "OPTIONS" or path.startswith(OPEN_PREFIXES):
        return _of_page(pages, scope)
    level = LEVELS.get(path, Level.NORMAL)
    needed = keys.api_key if level is Level.NORMAL else keys.admin_api_key or keys.api_key
    authorization = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    if needed is not None and not _matches(authorization, needed):
        return JSONResponse({"error": "Unauthorized"}, 401)
    if level is Level.ADMIN_REQUIRED and keys.admin_api_key is None:
        return JSONResponse({"error": NO_ADMIN_KEY}, 400)
    return _of_page(pages, scope) if needed is None else None


def _of_page(pages: Allowed, scope: Scope) -> JSONResponse | None:
    why = pages.refusal(scope["method"], scope["headers"])
    if why is None:
        return None
    error = {"message": why, "type": "invalid_request_error", "param": why.partition(":")[0], "code": None}
    return JSONResponse({"error": error}, 403)


class AuthMiddleware:
    """Checks every HTTP request before anything else reads it."""

    def __init__(self, app: ASGIApp, keys: Keys, pages: Allowed = ANY_PAGE) -> None:
        self._app = app
        self._keys, self._pages = keys, pages

        self._refused = RefusedKeys()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = check(self._keys, scope, self._pages) if scope["type"] == "http" else None
        if refusal is not None:
            self._refused.tell(scope, _WHY[refusal.status_code])
        await (refusal or self._app)(scope, receive, send)
