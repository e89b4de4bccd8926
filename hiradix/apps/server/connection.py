"""A client's connection: uvicorn's, with deadlines for clients that are slow on purpose, and a cap.

Life of one that is kept open: a head within HEAD_TIMEOUT_S, an answer, and then the keep-alive time, which
the answer's `keep-alive` header names. After that a request is still answered for CLOSING_S, with
`connection:
close`: a client that goes by the header never sends into the close.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import re
import resource
import termios
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from hiradix.apps.server.refusals import REFUSALS

HEAD_TIMEOUT_S = 30.0
"""A request's head is there so long after the connection was opened, or after it began."""
KEEP_ALIVE_S = 75.0
"""A connection without a request is kept so long after an answer."""
CLOSING_S = 5.0
"""For so long after that a request is still answered."""
DRAIN_S = 1.0
"""When the server is told to stop, a connection without a request has so long to bring one that is on its
way."""
MAX_HEAD_BYTES = 16 * 1024
STOP_BODY_TIMEOUT_S = 2.0
"""A body that comes in when the server is told to stop has so long."""
MAX_CONNECTIONS = 4096


def _refusal(status: bytes, reason: bytes, more: bytes = b"") -> bytes:
    return (
        b"HTTP/1.1 %s\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n%s"
        % (status, len(reason), more, reason)
    )


FULL = _refusal(b"503 Service Unavailable", b"too many connections; try again later\n", b"retry-after: 1\r\n")
INVALID = _refusal(b"400 Bad Request", b"Invalid HTTP request received.\n")
TOO_LONG = _refusal(b"431 Request Header Fields Too Large", b"the request's head is too long\n")
LATE = _refusal(b"408 Request Timeout", b"the request's head did not come in time\n")


def most_connections() -> int:
    """MAX_CONNECTIONS, or half of the files this process may have open: the others are for storage."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if allowed == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, allowed // 2)


def http_settings(keep_alive_s: float = KEEP_ALIVE_S) -> dict[str, Any]:
    """The arguments of uvicorn's Config for our applications. Headers say nothing of who asks."""
    return {
        "lifespan": "off",
        "log_config": None,
        "http": Connection,
        "ws": "none",
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": keep_alive_s,
        "h11_max_incomplete_event_size": MAX_HEAD_BYTES,
        "headers": [("keep-alive", f"timeout={keep_alive_s:.0f}")] if keep_alive_s >= 1 else [],
    }


_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_NAME = re.compile(rb"[^\s:]+")


class StrictHTTP(h11.Connection):
    """h11 that refuses heads of which two readers may think differently, where a proxy is one and we the
    other."""

    status = 400
    """The answer to a request that was refused."""

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            self._check_head(self.trailing_data[0])
        return super().next_event()

    def _check_head(self, data: bytes) -> None:
        """Raise RemoteProtocolError where the head that `data` begins with is there and is not plain."""
        found = _END_OF_HEAD.search(data)
        if (len(data) if found is None else found.start()) > MAX_HEAD_BYTES:
            self.status = 431
            raise h11.RemoteProtocolError("the head is too long", 431)
        if found is None:
            return
        names = []
        for line in data[: found.start()].lstrip(b"\r\n").split(b"\n")[1:]:
            if line[:1] in (b" ", b"\t"):
                raise h11.RemoteProtocolError("a header's line is folded")
            name = _NAME.match(line)
            names.append(b"" if name is None else name[0].lower())
            if names[-1] == b"content-length" and b"," in line:
                raise h11.RemoteProtocolError("the body's length is a list")
        lengths, codings = names.count(b"content-length"), names.count(b"transfer-encoding")
        if lengths + codings > 1:
            raise h11.RemoteProtocolError("the body's length is given more than once")
        if codings and b" HTTP/1.1" not in data[: data.find(b"\n")]:
            raise h11.RemoteProtocolError("HTTP/1.0 has no transfer-encoding")


class Connection(H11Protocol):
    """uvicorn has no deadline for a request's head, and waits at the end for bodies that never come."""

    conn: StrictHTTP
    _deadline: asyncio.TimerHandle | None = None
    _is_closing = False  # the keep-alive time is over: the next answer is the last one
    _is_stopping = False  # the server is
    _is_last = False  # the request under way is the last one

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.conn = StrictHTTP(h11.SERVER, MAX_HEAD_BYTES)

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
        was_idle = not self._is_answering() and not self.conn.trailing_data[0]
        super().data_received(data)
        if self._is_answering():
            if self._is_closing and not self._is_last:
                self._answer_last()
            elif self.cycle.keep_alive or not self.cycle.more_body or not self._is_stopping:
                self._end_within(None)  # else it is late already
            self._read_on()
        elif was_idle and self.cycle is not None and self._has_begun():
            self._end_within(HEAD_TIMEOUT_S)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that cannot be read, and close the connection. uvicorn's own would raise where it
        is too late for an answer, with a traceback in the log for each."""
        REFUSALS["invalid"] += 1
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            refusal = TOO_LONG if self.conn.status == 431 else INVALID
            self.conn.send_failed()
            self.transport.write(refusal)
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which begins the next request, if that is there
        self._unset_keepalive_if_required()  # ours is the one deadline
        if self._is_answering():
            return
        if self.conn.their_state is not h11.IDLE or self._has_begun():
            self._end_within(HEAD_TIMEOUT_S)  # the rest of a body nobody wants, or the next head
        else:
            self._end_within(self.timeout_keep_alive)

    def shutdown(self) -> None:
        if not self._is_answering() and self.conn.our_state is h11.IDLE and not self.transport.is_closing():
            self._is_closing = self._is_stopping = True  # a request that is on its way is answered
            self._end_within(DRAIN_S)
            return
        self._is_stopping = True
        super().shutdown()
        if self._is_answering() and self.cycle.more_body and not self.cycle.response_started:
            self._end_within(STOP_BODY_TIMEOUT_S)

    def _answer_last(self) -> None:
        """Have this answer say that it is the last one of the connection."""
        cycle, self._is_last = self.cycle, True
        cycle.keep_alive = False
        if not cycle.response_started and CLOSE_HEADER not in cycle.scope["headers"]:
            self.headers.append(CLOSE_HEADER)  # of the scope, and uvicorn answers it with the same
        self._end_within(STOP_BODY_TIMEOUT_S if self._is_stopping and cycle.more_body else None)

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
        elif self._is_kept() and not self._is_closing:
            self._is_closing = True
            self._end_within(CLOSING_S)
        elif self._is_kept() and self._has_unread():
            self._end_within(DRAIN_S)  # it is read next
        elif self._is_kept():
            self.transport.close()
        else:
            self.transport.abort()

    def _has_unread(self) -> bool:
        """There is something in the socket that the event loop has not read yet."""
        socket = self.transport.get_extra_info("socket")
        if socket is None or socket.fileno() < 0:
            return False
        num_bytes = array.array("i", [0])
        fcntl.ioctl(socket.fileno(), termios.FIONREAD, num_bytes)
        return num_bytes[0] > 0

    def _is_kept(self) -> bool:
        """Whether the connection is idle between two requests, after at least one answer."""
        return self.cycle is not None and self.conn.our_state is h11.IDLE

    def _has_begun(self) -> bool:
        """A part of a head is there: of no request is anything answered yet."""
        return self.conn.our_state is h11.IDLE and bool(self.conn.trailing_data[0])
