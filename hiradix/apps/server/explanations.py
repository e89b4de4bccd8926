"""GET /explain: where the tokens of recent requests came from, and why what was computed had to be.

No text and no tokens of prompts are in an explanation, only positions in them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from hiradix.apps.server.errors import ApiError
from hiradix.explain import Explanation

MOST_KEPT: Final = 1024
MOST_SHOWN: Final = 1000
SHOWN: Final = 20


class Explanations:
    """The explanations of the last `MOST_KEPT` requests, by their ids. Event loop only."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Explanation] = OrderedDict()
        self.router = APIRouter()
        self.router.add_api_route("/explain", self.latest, methods=["GET"])
        self.router.add_api_route("/explain/{request_id}", self.one, methods=["GET"])

    def keep(self, explanation: Explanation) -> None:
        """Remember one; the oldest is forgotten for it."""
        self._by_id[explanation.request_id] = explanation
        while len(self._by_id) > MOST_KEPT:
            self._by_id.popitem(last=False)

    async def one(self, request_id: str) -> Response:
        """GET /explain/ID: the request with this id, which its answer has."""
        found = self._by_id.get(request_id)
        if found is None:
            message = f"id: {request_id[:64]!r} is not among the last {MOST_KEPT} requests"
            raise ApiError(message, param="id", status=404)
        return JSONResponse(found.as_json())

    async def latest(self, request: Request) -> Response:
        """GET /explain?last=N: the latest first."""
        text = request.query_params.get("last", str(SHOWN))
        if not text.isdecimal() or not text.isascii() or not 1 <= int(text[:9]) <= MOST_SHOWN:
            raise ApiError(f"last: expected a number in 1..{MOST_SHOWN}", param="last")
        latest = list(reversed(self._by_id.values()))[: int(text)]
        return JSONResponse({"requests": [one.as_json() for one in latest]})
