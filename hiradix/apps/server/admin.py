"""Cache administration over HTTP, with upstream's paths, bodies and status codes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from dataclasses import dataclass

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import JSONResponse, PlainTextResponse, Response

from hiradix.apps.server import audit
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.intake import read_json
from hiradix.apps.server.schema import first_error
from hiradix.apps.server.service import NO_HOST_TIER, AdminResult, AttachRequest, Service
from hiradix.config import HiCacheConfig
from hiradix.settings import redact
from hiradix.storage.attach.rules import DEFAULT, AttachRefused, AttachRules, Wanted, in_log, over_http

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting "
    "requests, the operation will not be performed.)\n"
)
CLEARED = "Hierarchical cache storage backend cleared.\n"
DEPRECATED = "Deprecated endpoint. Use POST /hicache/storage-backend/clear.\n"
FLUSH_BUSY = "Another flush_cache is already in progress."
MAX_WAIT_S = 600.0


class AttachBody(BaseModel):
    """Body of PUT /hicache/storage-backend: a prepared configuration's `name`, or a backend with its
    settings."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str | None = Field(default=None, min_length=1)
    hicache_storage_backend: str | None = Field(default=None, min_length=1)
    hicache_storage_backend_extra_config_json: str | None = None
    hicache_storage_prefetch_policy: str | None = None
    hicache_write_policy: str | None = None

    def check(self) -> None:
        """Raise ApiError unless it names one thing."""
        if self.name is None:
            if self.hicache_storage_backend is None:
                field = "hicache_storage_backend"
                raise ApiError(f"{field}: this or name is needed", param=field)
        elif self.hicache_storage_backend or self.hicache_storage_backend_extra_config_json:
            raise ApiError(
                "name: stands for backend and settings, which are not given beside it", param="name"
            )


@dataclass(frozen=True)
class StorageView:
    """The answer of GET /hicache/storage-backend; secrets in the extra config are replaced by '***'."""

    hicache_storage_backend: str | None
    hicache_storage_backend_extra_config: str | None
    hicache_storage_prefetch_policy: str
    hicache_write_policy: str

    @staticmethod
    def of(config: HiCacheConfig, extra_config_text: str | None) -> StorageView:
        """The view of a server as it was started."""
        attached = config.hicache_storage_backend is not None
        return StorageView(
            config.hicache_storage_backend,
            shown_extra_config(extra_config_text) if attached else None,
            config.hicache_storage_prefetch_policy,
            config.hicache_write_policy,
        )

    def attached(self, request: AttachRequest) -> StorageView:
        """The view after a successful attach; a backend that was there already keeps its settings."""
        extra = self.hicache_storage_backend_extra_config
        if self.hicache_storage_backend is None:
            extra = shown_extra_config(request.extra_config_text)
        return StorageView(
            request.backend,
            extra,
            request.prefetch_policy or self.hicache_storage_prefetch_policy,
            request.write_policy or self.hicache_write_policy,
        )

    def detached(self) -> StorageView:
        """The view after a detach: policies persist."""
        return dataclasses.replace(
            self, hicache_storage_backend=None, hicache_storage_backend_extra_config=None
        )


def shown_extra_config(text: str | None) -> str | None:
    """`text` as given, with secrets replaced when it is JSON that holds any; other text is hidden."""
    if text is None or text.startswith("@"):
        return text
    try:
        values = json.loads(text)
    except ValueError:
        return "***"
    shown = redact(values)
    return text if shown == values else json.dumps(shown)


def bad_body(error: ApiError) -> Response:
    """Upstream's form of a body that fails validation."""
    body = {
        "object": "error",
        "message": error.message,
        "type": "Bad Request",
        "param": error.param,
        "code": 400,
    }
    return JSONResponse(body, 400)


class Admin:
    """The admin endpoints over one engine; one storage operation at a time."""

    def __init__(self, service: Service, view: StorageView, rules: AttachRules):
        self._service = service
        self.view = view
        self._rules = rules
        # What is attached, to be attached again by a request that is to change its policies.
        self._now = rules.named(DEFAULT) if DEFAULT in rules.prepared else None
        self._storage_lock = asyncio.Lock()
        self._flushing = False
        self.router = APIRouter()
        add = self.router.add_api_route
        add("/flush_cache", self.flush, methods=["GET", "POST"])
        add("/hicache/storage-backend", self.show, methods=["GET"])
        add("/hicache/storage-backend", self.attach, methods=["PUT"])
        add("/hicache/storage-backend", self.detach, methods=["DELETE"])
        add("/hicache/storage-backend/clear", self.clear, methods=["POST"])
        add("/clear_hicache_storage_backend", self.clear_deprecated, methods=["GET", "POST"])
        add("/get_hicache_l3_cache_layout", self.layout, methods=["GET"])

    async def flush(self, request: Request) -> Response:
        """GET, POST /flush_cache?timeout=S: empty device and host tiers when idle; storage keeps all."""
        timeout_s, refused = _seconds(request, "timeout")
        if refused is not None:
            return refused
        if self._flushing:
            return PlainTextResponse(FLUSH_BUSY, 400)
        self._flushing = True
        try:
            result = await self._service.flush(timeout_s or 0.0)
        finally:
            self._flushing = False
        _log(request, "flush of device and host", result)
        if result.ok:
            return PlainTextResponse(FLUSHED)
        return PlainTextResponse(result.message or "Flush cache failed.\n", 400)

    async def show(self) -> Response:
        """GET /hicache/storage-backend."""
        return JSONResponse(dataclasses.asdict(self.view))

    async def attach(self, request: Request) -> Response:
        """PUT /hicache/storage-backend?wait=S: with wait, while serving; without, only when idle."""
        wait_s, refused = _seconds(request, "wait")
        if refused is not None:
            return refused
        try:
            body = AttachBody.model_validate(await read_json(request))
            body.check()
        except ApiError as error:
            return bad_body(error)
        except ValidationError as error:
            param, message = first_error(error)
            return bad_body(ApiError(message, param=param))
        async with self._storage_lock:
            try:
                found = self._wanted(body)
            except AttachRefused as error:
                audit.act(request.scope, "attach of storage", f"refused: {audit.plain(error)}")
                return bad_body(ApiError(str(error), param=error.param))
            wanted = AttachRequest(
                found.backend,
                found.text,
                body.hicache_storage_prefetch_policy,
                body.hicache_write_policy,
                wait_s,
            )
            result = await self._service.attach(wanted)
            named = f" ({found.name})" if found.name else ""
            what = f"attach of storage {found.backend}{named}"
            if result.ok:
                self.view, self._now = self.view.attached(wanted), found
                _log(request, what, result)
            else:
                audit.act(request.scope, what, f"failed: {in_log(result.message, found.text)}")
                result = AdminResult(False, over_http(result.message))
        return _storage_answer("attach", result)

    def _wanted(self, body: AttachBody) -> Wanted:
        """The storage it asks for. Raises AttachRefused if that is not permitted."""
        if body.name is not None:
            return self._rules.named(body.name)
        backend, text = body.hicache_storage_backend or "", body.hicache_storage_backend_extra_config_json
        if not text and self._now is not None and backend == self.view.hicache_storage_backend:
            return self._now
        return self._rules.wanted(backend, text)

    async def detach(self, request: Request) -> Response:
        """DELETE /hicache/storage-backend?wait=S, as for PUT; nothing attached is a success."""
        wait_s, refused = _seconds(request, "wait")
        if refused is not None:
            return refused
        async with self._storage_lock:
            result = await self._service.detach(wait_s)
            if result.ok:
                self.view = self.view.detached()
            _log(request, "detach of storage", result)
        return _storage_answer("detach", result)

    async def clear(self, request: Request) -> Response:
        """POST /hicache/storage-backend/clear."""
        return await self._clear(request, "")

    async def clear_deprecated(self, request: Request) -> Response:
        """GET, POST /clear_hicache_storage_backend, the old name."""
        return await self._clear(request, DEPRECATED)

    async def _clear(self, request: Request, prefix: str) -> Response:
        async with self._storage_lock:
            result = await self._service.clear_storage()
        _log(request, "clear of storage", result)
        if result.ok:
            return PlainTextResponse(prefix + CLEARED)
        if result.message == NO_HOST_TIER:  # upstream's answer; its clients look at the status
            return PlainTextResponse(prefix + CLEARED, 400)
        return PlainTextResponse(f"{prefix}Failed to clear HiCache storage backend.\n{result.message}\n", 400)

    async def layout(self) -> Response:
        """GET /get_hicache_l3_cache_layout."""
        return JSONResponse(self.layout_json())

    def layout_json(self) -> dict[str, object]:
        """Upstream's record about storage objects that other processes may read: none here."""
        backend = self.view.hicache_storage_backend
        return {
            "enabled": False,
            "backend": backend,
            "page_size": None,
            "hicache_object_layout": None,
            "reason": "storage objects are private to this server",
        }


def _seconds(request: Request, name: str) -> tuple[float | None, Response | None]:
    """The query's `name` in 0..MAX_WAIT_S, None if it has none; and the answer if it is anything else."""
    text = request.query_params.get(name)
    if text is None:
        return None, None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if math.isfinite(seconds) and 0 <= seconds <= MAX_WAIT_S:
        return seconds, None
    return None, PlainTextResponse(f"{name} must be a number in 0..{MAX_WAIT_S:g}.\n", 400)


def _log(request: Request, what: str, result: AdminResult) -> None:
    reason = in_log(result.message, None).strip()
    audit.act(request.scope, what, "done" if result.ok else f"failed: {reason}")


def _storage_answer(verb: str, result: AdminResult) -> Response:
    if result.ok:
        return PlainTextResponse(f"HiCache storage backend {verb}ed.\n{result.message}\n")
    return PlainTextResponse(f"Failed to {verb} HiCache storage backend.\n{result.message}", 400)
