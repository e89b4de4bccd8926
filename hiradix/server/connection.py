"""A client's connection: uvicorn's, with deadlines for clients that are slow on purpose, and a cap."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from hiradix.server.refusals import REFUSALS

HEAD_TIMEOUT_S = 30.0
"""A request's head is there so long after the connection was opened, or after the answer before."""
STOP_BODY_TIMEOUT_S = 2.0
"""A body that comes in when the server is told to stop has so long."""
MAX_CONNECTIONS = 4096


def _refusal(status: bytes, reason: bytes, more: bytes = b"") -> bytes:
    return (
        b"HTTP/1.1 %s\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n%s"
        % (status, len(reason), more, reason)
    )


FULL = _refusal(b"503 Service Unavailable", b"too many connections; try again later\n", b"retry-after: 1\r\n")
LATE = _refusal(b"408 Request Timeout", b"the request's head did not come in time\n")


def most_connections() -> int:
    """MAX_CONNECTIONS, or half of the files this process may have open: the others are for storage."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if allowed == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, allowed // 2)


def http_settings() -> dict[str, Any]:
    """How uvicorn serves our applications, as arguments of its Config."""
    return {"lifespan": "off", "log_config": None, "http": Connection, "ws": "none", "server_header": False}


class Connection(H11Protocol):
    """uvicorn has no deadline for a request's head, and waits at the end for bodies that never come."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            REFUSALS["full"] += 1
            transport.write(FULL)
            transport.close()
        self._end_within(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_within(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering():
            if self.cycle.keep_alive or not self.cycle.more_body:  # else it is late already
                self._end_within(None)
            self._read_on()

    def send_400_response(self, msg: str) -> None:
        """Where it is too late for an answer uvicorn's own would raise, a traceback in the log for each."""
        REFUSALS["invalid"] += 1
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which begins the next request, if that is there
        if not self._is_answering():
            self._end_within(HEAD_TIMEOUT_S)

    def shutdown(self) -> None:
        super().shutdown()
        if self._is_answering() and self.cycle.more_body and not self.cycle.response_started:
            self._end_within(STOP_BODY_TIMEOUT_S)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _read_on(self) -> None:
        """Read a little more behind a request's end: without that nobody sees that the client has left."""
        if self.flow.read_paused and not self.cycle.more_body:
            if len(self.conn.trailing_data[0]) < HIGH_WATER_LIMIT:
                self.flow.resume_reading()

    def _end_within(self, timeout_s: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if timeout_s is None else self.loop.call_later(timeout_s, self._end, timeout_s)

    def _end(self, timeout_s: float) -> None:
        """End it, behind what is still to be sent: that has a deadline of its own, set on the listener."""
        if self.transport.get_write_buffer_size() > 0:
            self._end_within(timeout_s)
        elif self._has_begun():
            REFUSALS["late"] += 1
            self.transport.write(LATE)
            self.transport.close()
        else:
            self.transport.abort()

    def _has_begun(self) -> bool:
        """A part of a head is there: of no request is anything answered yet."""
        return self.conn.our_state is h11.IDLE and bool(self.conn.trailing_data[0])
