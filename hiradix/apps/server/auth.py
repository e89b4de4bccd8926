"""Access control: five levels, bearer keys compared in constant time, one table of paths."""

from __future__ import annotations

import enum
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from hiradix.apps.server.audit import RefusedKeys
from hiradix.browsers import Allowed

NO_ADMIN_KEY = (
    "This endpoint requires admin API key, but this server was started without one (admin-api-key). "
    "Restart with --admin-api-key to enable."
)


class Level(enum.Enum):
    """The access that a path requires."""

    NORMAL = "normal"  # the api key, where one is set
    HINT = "hint"  # the same, or the admin key
    ADMIN_OPTIONAL = "admin_optional"  # the admin key, else the api key, else nothing
    ADMIN_REQUIRED = "admin_required"  # the admin key; off (400) on a server without one
    OWN = "own"  # the same, or a tenant's key, for what is his


LEVELS = {
    "/v1/end_of_session": Level.HINT,
    "/v1/keep_alive": Level.HINT,
    "/flush_cache": Level.ADMIN_OPTIONAL,
    "/hicache/storage-backend": Level.ADMIN_REQUIRED,
    "/hicache/storage-backend/clear": Level.ADMIN_REQUIRED,
    "/clear_hicache_storage_backend": Level.ADMIN_REQUIRED,
}
LEVELS_BELOW = {
    "/explain": Level.ADMIN_OPTIONAL,
    "/hicache/intents": Level.OWN,
    "/hicache/prefix": Level.OWN,
    "/hicache/tenants": Level.OWN,
}
"""Of these paths and of all below them."""
OPEN_PREFIXES = ("/health", "/ready", "/metrics")
PROBES = ("/health", "/ready")
"""Say no more than that somebody listens: load balancers ask for them by any name."""
ANY_PAGE = Allowed()
_WHY = {401: "a wrong key, or none", 400: "it is off without an admin key", 403: "sent by another's web page"}


@dataclass(frozen=True)
class Keys:
    """The server's keys; never shown in a repr. tenants: of further keys, by key; None for one without."""

    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    tenants: Mapping[str, str | None] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Caller:
    """The sender of a request, by its key. tenant: whose pages it may share; None: everybody's."""

    tenant: str | None = None
    is_admin: bool = False


NOBODY = Caller()
_CALLER = "hiradix.caller"


def caller_of(scope: Scope) -> Caller:
    """Whose request it is, where AuthMiddleware has let it pass."""
    found: Caller = scope.get(_CALLER, NOBODY)
    return found


class KeyRing:
    """Knows callers by their keys. A key is looked up by a digest under a secret of the process's own, so
    how long that takes says nothing of the keys there are. `put_in` may be called while requests come."""

    def __init__(self, keys: Keys) -> None:
        self._secret = os.urandom(32)
        self.put_in(keys)

    def put_in(self, keys: Keys) -> None:
        """Know these keys from now on, and no others."""
        found = {self._digest(key): Caller(tenant) for key, tenant in keys.tenants.items()}
        if keys.api_key is not None:
            found[self._digest(keys.api_key)] = NOBODY
        self._admin = None if keys.admin_api_key is None else self._digest(keys.admin_api_key)
        self._api = None if keys.api_key is None else self._digest(keys.api_key)
        self._callers = found
        self.keys = keys

    @property
    def has_admin(self) -> bool:
        return self._admin is not None

    @property
    def is_open(self) -> bool:
        """Requests that administer nothing need no key."""
        return not self._callers

    def caller(self, authorization: bytes) -> Caller | None:
        """Whose key it is, of those that may have prompts answered."""
        token = self._token(authorization)
        return None if token is None else self._callers.get(token)

    def is_admin(self, authorization: bytes) -> bool:
        """Whether it is the admin key."""
        token = self._token(authorization)
        return token is not None and self._admin is not None and hmac.compare_digest(token, self._admin)

    def is_api_key(self, authorization: bytes) -> bool:
        """Whether it is the key of `--api-key`, which belongs to no tenant."""
        token = self._token(authorization)
        return token is not None and self._api is not None and hmac.compare_digest(token, self._api)

    def _token(self, authorization: bytes) -> bytes | None:
        scheme, _, token = authorization.partition(b" ")
        return self._digest_of(token.strip()) if scheme.lower() == b"bearer" else None

    def _digest(self, key: str) -> bytes:
        return self._digest_of(key.encode())

    def _digest_of(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, "sha256")


def level_of(path: str) -> Level:
    """The access that `path` requires."""
    for above, level in LEVELS_BELOW.items():
        if path == above or path.startswith(above + "/"):
            return level
    return LEVELS.get(path, Level.NORMAL)


def check(ring: KeyRing, scope: Scope, pages: Allowed = ANY_PAGE) -> JSONResponse | None:
    """None when the request may pass, else the answer that refuses it; `caller_of` says whose it is.

    pages: whose web pages may have sent it, where it has no key: pages of others have none.
    """
    path = scope["path"]
    if path in PROBES:
        return None
    if scope["method"] == "OPTIONS" or path.startswith(OPEN_PREFIXES):
        return _of_page(pages, scope)
    level = level_of(path)
    authorization = _authorization(scope)
    is_admin = ring.is_admin(authorization)
    if level in (Level.NORMAL, Level.HINT):
        caller = NOBODY if ring.is_open else ring.caller(authorization)
        if level is Level.HINT and is_admin:
            caller = Caller(is_admin=True)
        if caller is None:
            return _unauthorized()
        scope[_CALLER] = caller
        return _of_page(pages, scope) if ring.is_open and not is_admin else None
    if level is Level.OWN and not is_admin:
        caller = ring.caller(authorization)
        if caller is not None and caller.tenant is not None:
            scope[_CALLER] = caller
            return None
    if ring.has_admin:
        return None if is_admin else _unauthorized()
    if ring.is_open:
        refusal = _of_page(pages, scope)
    elif level is Level.ADMIN_OPTIONAL and ring.keys.api_key is None:
        return _off()  # a tenant's key does not empty what others have
    elif level is Level.ADMIN_OPTIONAL:
        refusal = None if ring.is_api_key(authorization) else _unauthorized()
    else:
        refusal = None if ring.caller(authorization) is not None else _unauthorized()
    return _off() if refusal is None and level is not Level.ADMIN_OPTIONAL else refusal


def _authorization(scope: Scope) -> bytes:
    """The caller's key as `Authorization` has it; Anthropic's clients send it as `x-api-key`."""
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        found.setdefault(name, value)
    if b"authorization" in found or b"x-api-key" not in found:
        return found.get(b"authorization", b"")
    return b"Bearer " + found[b"x-api-key"]


def _unauthorized() -> JSONResponse:
    return JSONResponse({"error": "Unauthorized"}, 401)


def _off() -> JSONResponse:
    return JSONResponse({"error": NO_ADMIN_KEY}, 400)


def _of_page(pages: Allowed, scope: Scope) -> JSONResponse | None:
    why = pages.refusal(scope["method"], scope["headers"])
    if why is None:
        return None
    error = {"message": why, "type": "invalid_request_error", "param": why.partition(":")[0], "code": None}
    return JSONResponse({"error": error}, 403)


class AuthMiddleware:
    """Checks every HTTP request before anything else reads it."""

    def __init__(self, app: ASGIApp, ring: KeyRing, pages: Allowed = ANY_PAGE) -> None:
        self._app = app
        self._ring, self._pages = ring, pages

        self._refused = RefusedKeys()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = check(self._ring, scope, self._pages) if scope["type"] == "http" else None
        if refusal is not None:
            self._refused.tell(scope, _WHY[refusal.status_code])
        await (refusal or self._app)(scope, receive, send)
