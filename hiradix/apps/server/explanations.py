"""GET /explain: where the tokens of recent requests came from, and why what was computed had to be.

No text and no tokens of prompts are in an explanation, only positions in them.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from hiradix.apps.server.errors import ApiError
from hiradix.errors import ConfigError
from hiradix.explain import PATH, RecentExplanations


class Explanations(RecentExplanations):
    """Recent explanations and the routes that show them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = APIRouter()
        self.router.add_api_route(PATH, self.show_latest, methods=["GET"])
        self.router.add_api_route(PATH + "/{request_id}", self.show_one, methods=["GET"])

    async def show_one(self, request_id: str) -> Response:
        """GET /explain/ID: the request with this id, which its answer has."""
        try:
            return JSONResponse(self.one(request_id))
        except ConfigError as error:
            raise ApiError(str(error), param="id", status=404) from error

    async def show_latest(self, request: Request) -> Response:
        """GET /explain?last=N: the latest first."""
        try:
            return JSONResponse(self.latest(request.query_params.get("last")))
        except ConfigError as error:
            raise ApiError(str(error), param="last") from error
