"""The FastAPI application: OpenAI endpoints, admin API, health and metrics over one `Service`."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

import hiradix
from hiradix.apps.engine.api import EngineBusy, EngineStopped
from hiradix.apps.server.admin import Admin, StorageView
from hiradix.apps.server.answering import Answering
from hiradix.apps.server.api_docs import add_docs
from hiradix.apps.server.auth import AuthMiddleware, KeyRing, Keys
from hiradix.apps.server.dialects.anthropic import Anthropic, anthropic_error
from hiradix.apps.server.dialects.responses import Responses
from hiradix.apps.server.dialects.tokens import TokenEndpoints
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.explanations import Explanations
from hiradix.apps.server.intents import IntentEndpoints
from hiradix.apps.server.logs import RequestIds
from hiradix.apps.server.metrics import RequestMetrics
from hiradix.apps.server.openai import OpenAI
from hiradix.apps.server.service import Service, Snapshot
from hiradix.browsers import Allowed
from hiradix.config import HiCacheConfig
from hiradix.settings import redact
from hiradix.storage.attach.rules import AttachRules, default_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AppSettings:
    """The application's settings beside the engine. `extra_config_text`: the flag's text, to show.

    attach: what may be attached over HTTP beside that of the start. pages: whose web pages may ask, and by
    which names of this server. needs_salt: requests say whose cache they use. other_names: by which requests may
    ask for the model, too. tool_parser: how it writes tool calls; None: as its chat template says.
    """

    model_name: str
    cache: HiCacheConfig = field(default_factory=HiCacheConfig)
    keys: Keys = field(default_factory=Keys)
    metric_labels: dict[str, str] = field(default_factory=dict)
    extra_config_text: str | None = field(default=None, repr=False)
    attach: AttachRules = field(default_factory=AttachRules)
    pages: Allowed = Allowed()
    needs_salt: bool = False
    other_names: tuple[str, ...] = ()
    tool_parser: str | None = None

    @property
    def attach_rules(self) -> AttachRules:
        """`attach`, and what was attached at start."""
        start = default_of(
            self.cache.hicache_storage_backend, self.cache.hicache_storage_backend_extra_config
        )
        return dataclasses.replace(self.attach, prepared={**start, **self.attach.prepared})


class Information:
    """Health, server information and metrics."""

    def __init__(self, service: Service, settings: AppSettings, admin: Admin, metrics: RequestMetrics):
        self._service = service
        self._settings = settings
        self._admin = admin
        self._metrics = metrics
        self._last: Snapshot | None = None
        self.router = APIRouter()
        add = self.router.add_api_route
        add("/health", self.health, methods=["GET", "HEAD"])
        add("/ready", self.health, methods=["GET", "HEAD"])
        add("/metrics", self.metrics, methods=["GET"])
        add("/server_info", self.server_info, methods=["GET"])
        add("/get_server_info", self.server_info, methods=["GET"])

    async def health(self) -> Response:
        """GET /health: 200 while the engine runs, else 503."""
        return Response(status_code=200 if self._service.healthy else 503)

    async def metrics(self) -> Response:
        """GET /metrics; while the engine is too busy to answer, the figures of the scrape before."""
        try:
            self._last = await self._service.snapshot()
        except (TimeoutError, EngineStopped):
            logger.warning("no fresh figures for /metrics: the engine does not answer")
        return Response(self._metrics.exposition(self._last), media_type=CONTENT_TYPE_LATEST)

    async def server_info(self) -> dict[str, Any]:
        """GET /server_info: version, configuration without secrets, load and cache figures."""
        snapshot = await self._service.snapshot()
        return {
            **config_json(self._settings.cache),
            "version": hiradix.__version__,
            "served_model_name": self._settings.model_name,
            **dataclasses.asdict(self._admin.view),
            "engine": dataclasses.asdict(snapshot.engine),
            "cache": {**dataclasses.asdict(snapshot.cache), "cache_type": snapshot.cache_type},
            "transfers": {kind: dataclasses.asdict(t) for kind, t in snapshot.transfers.items()},
            "storage": {"backend": snapshot.storage_backend, "figures": redact(dict(snapshot.storage))},
            "hicache_l3_cache_layout": self._admin.layout_json(),
            "kv_events": snapshot.kv_events,
            "kv_events_figures": snapshot.kv_events_figures,
        }


def config_json(config: HiCacheConfig) -> dict[str, Any]:
    """The cache's configuration for display, secrets replaced by '***'."""
    names = [entry.name for entry in dataclasses.fields(config)]
    values = {name: getattr(config, name) for name in names}
    extra = values.pop("hicache_storage_backend_extra_config")
    values["prefetch"] = {
        "threshold_tokens": extra.prefetch_threshold,
        "timeout_base_s": extra.prefetch_timeout_base,
        "timeout_s_per_ki_token": extra.prefetch_timeout_per_ki_token,
    }
    values["radix_eviction_policy_config"] = dict(config.radix_eviction_policy_config)
    shown: dict[str, Any] = redact(values)
    return shown


_HEADERS = {503: {"retry-after": "1"}, 408: {"connection": "close"}}  # the rest of a late body may never come


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    is_anthropic = request.url.path.startswith("/v1/messages")
    body = anthropic_error(error) if is_anthropic else error.body()
    return JSONResponse(body, error.status, _HEADERS.get(error.status))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = ApiError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code).body()
    return JSONResponse(body, error.status_code, error.headers)


async def _no_engine(request: Request, error: Exception) -> Response:
    message = str(error) or "the engine did not answer in time"
    return await _api_error(request, ApiError(message, status=503, code="engine_unavailable"))


def create_app(service: Service, settings: AppSettings) -> FastAPI:
    """The application; it starts and stops nothing, `service` is the caller's."""
    app = FastAPI(
        title="hiradix",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the address would be the client's Host header
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    explanations = Explanations()
    metrics = RequestMetrics(settings.model_name, settings.metric_labels, explanations.keep)
    admin = Admin(service, StorageView.of(settings.cache, settings.extra_config_text), settings.attach_rules)
    names = (settings.model_name, *settings.other_names)
    answering = Answering(service, names, metrics, settings.needs_salt, settings.tool_parser)
    for endpoints in (OpenAI, Anthropic, Responses, TokenEndpoints):
        app.include_router(endpoints(answering).router)
    app.include_router(admin.router)
    app.include_router(IntentEndpoints(service, answering).router)
    app.include_router(explanations.router)
    app.include_router(Information(service, settings, admin, metrics).router)
    add_docs(app)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    for unavailable in (TimeoutError, EngineBusy, EngineStopped):
        app.add_exception_handler(unavailable, _no_engine)
    app.state.key_ring = KeyRing(settings.keys)
    app.add_middleware(AuthMiddleware, ring=app.state.key_ring, pages=settings.pages)
    app.add_middleware(RequestIds)
    if settings.pages.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(settings.pages.origins),
            allow_methods=["GET", "POST"],
            allow_headers=[
                *("authorization", "content-type", "x-api-key", "x-session-id", "anthropic-version"),
                *("anthropic-beta", "anthropic-dangerous-direct-browser-access"),
            ],
        )
    return app
