"""The server's log: one line a record, with time, level and request, as text or as a JSON object.

    2026-11-27T22:03:04.123Z INFO hiradix.audit [5f0c...]: flush of the cache by 127.0.0.1:5: done
    {"time": "2026-11-27T22:03:04.123Z", "level": "info", "logger": "hiradix.audit", "request_id": "5f0c...", ...

What is told over and over is told MAX_ALIKE times in PERIOD_S, then counted. Acts and refusals of
`hiradix.audit` are always told; refusals bound themselves.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from hiradix.apps.server.audit import AUDIT

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

FORMATS = ("text", "json")
HEADER = b"x-request-id"
MAX_ALIKE = 20
PERIOD_S = 10.0
MAX_KINDS = 1024
MAX_TEXT = 8192  # of one record's message
_GIVEN_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,64}")
_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


def set_up(level: str, form: str) -> None:
    """Have all loggers of the process write to stderr so. level: of `--log-level`; form: one of FORMATS."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    handler.addFilter(Bounded())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _time(record: logging.LogRecord) -> str:
    """UTC, in milliseconds."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"


class TextLines(logging.Formatter):
    """Formats records as text for people. An exception follows below the line."""

    def format(self, record: logging.LogRecord) -> str:
        own = _request_id.get()
        request = "" if own is None else f" [{own}]"
        line = f"{_time(record)} {record.levelname} {record.name}{request}: {_message(record)}"
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class JsonLines(logging.Formatter):
    """Formats records as JSON, one object a line, an exception in it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        own = _request_id.get()
        if own is not None:
            line["request_id"] = own
        line["message"] = _message(record)
        if record.exc_info is not None:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True)


class Bounded(logging.Filter):
    """Lets MAX_ALIKE records of one logger, level and text (before its values are put in) pass in PERIOD_S;
    the next one that passes says how many did not. Keeps MAX_KINDS of them. Any thread: a handler's filter is
    called under no lock, and a count may be off by what threads do at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._clock = clock
        self._kinds: OrderedDict[tuple[str, int, str], list[float]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == AUDIT.name:
            return True
        now_s, kind = self._clock(), (record.name, record.levelno, str(record.msg))
        begun_s, count, held = self._kinds.pop(kind, [now_s, 0, 0])
        if now_s - begun_s >= PERIOD_S:
            begun_s, count = now_s, 0
        passes = count < MAX_ALIKE
        if passes and held:
            record.msg, record.args = f"{record.getMessage()} (and {held:.0f} more like it)", None
        self._kinds[kind] = [begun_s, count + 1, 0 if passes else held + 1]
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        return passes


class RequestIds:
    """Gives each HTTP request an id, which lines of the log and the answer's `X-Request-Id` have: the client's
    own where it sends one of at most 64 letters, digits and `._:-`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        own = given if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            await send(_with_id(message, own))

        token = _request_id.set(own.decode())
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            _request_id.reset(token)


def _with_id(message: Message, own: bytes) -> MutableMapping[str, Any]:
    if message["type"] != "http.response.start":
        return message
    headers = [(name, value) for name, value in message.get("headers", ()) if name.lower() != HEADER]
    return {**message, "headers": [*headers, (HEADER, own)]}
