"""S3 requests on sockets of our own: a page's bytes pass straight between the socket and the page's memory.

The library hands out what it has read in memory of its own, put together from pieces and given back after
each page; that costs more than reading. So of servers that are spoken to without TLS the library only signs
the URL, and the request is sent here. All but a plain answer raises `Unanswered`: then the library is to be
asked, which knows of redirects, of bodies in chunks and of trying again.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from hiradix.storage.protocol import Page, fits, page_bytes

T = TypeVar("T")
_OK, _NOT_FOUND = 200, 404
_PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Answers that say nothing of whether the server takes such requests."""
_HEAD_BYTES = 8192
_MOST_SKIPPED = 1 << 16  # bytes of a body that nobody wants: a longer one costs its connection
_IOV = 512


class Unanswered(Exception):
    """No answer to go by. is_refusal: the server does not take such requests at all."""

    def __init__(self, why: str, is_refusal: bool = False):
        super().__init__(why)
        self.is_refusal = is_refusal


class Waits(NamedTuple):
    """connect_s: for a connection. request_s: for all of a request."""

    connect_s: float
    request_s: float


class Wire:
    """Connections to the server of signed URLs, each used by one thread at a time. Thread-safe.

    sign: the URL for a method and a path. Requests raise TimeoutError and Unanswered.
    """

    def __init__(self, sign: Callable[[str, str], str], waits: Waits):
        self._sign = sign
        self._waits = waits
        self._idle: list[tuple[str, _Connection]] = []
        self._closed = False

    def get(self, path: str, page: Page, ragged: bool) -> bool:
        """Read an object into `page`; False where there is none of that length (`ragged`: or less)."""

        def answered(connection: _Connection, head: _Head) -> bool:
            if head.status == _NOT_FOUND:
                connection.skip(head)
                return False
            if not fits(head.num_bytes, page, ragged):
                connection.is_spent = True
                return False
            connection.fill(page, head.num_bytes)
            return True

        return self._ask("GET", path, [], answered)

    def put(self, path: str, page: Page) -> None:
        """Store `page`."""

        def answered(connection: _Connection, head: _Head) -> None:
            connection.skip(head)
            if head.status == _NOT_FOUND:
                raise Unanswered("the bucket is not there")

        self._ask("PUT", path, page, answered)

    def size(self, path: str) -> int | None:
        """Length of an object, None where there is none."""
        return self._ask("HEAD", path, [], lambda _, head: head.num_bytes if head.status == _OK else None)

    def close(self) -> None:
        """Close idle connections now, the others after their request. Idempotent."""
        self._closed = True
        while self._idle:
            self._idle.pop()[1].close()

    def _ask(self, method: str, path: str, body: Page, answered: Callable[[_Connection, _Head], T]) -> T:
        url = urlsplit(self._sign(method, path))
        connection = self._connection(url.netloc)
        length = f"Content-Length: {page_bytes(body)}\r\n" if body else ""
        head = f"{method} {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n{length}\r\n"
        try:
            connection.send(head, body, self._waits.request_s)
            value = answered(connection, connection.head(method))
        except BaseException as error:
            connection.close()
            if isinstance(error, BlockingIOError):  # what a socket's own timeout looks like
                raise TimeoutError(f"{method}: no answer within {self._waits.request_s} s") from error
            if isinstance(error, OSError | ValueError) and not isinstance(error, TimeoutError):
                raise Unanswered(f"{method}: {error}") from error
            raise
        if self._closed or not connection.can_go_on:
            connection.close()
        else:
            self._idle.append((url.netloc, connection))
        return value

    def _connection(self, address: str) -> _Connection:
        try:
            known, connection = self._idle.pop()
            if known == address:
                return connection
            connection.close()
        except IndexError:
            pass
        host, _, port = address.rpartition(":")
        where = (host.strip("[]"), int(port)) if host else (address, 80)
        try:
            return _Connection(socket.create_connection(where, self._waits.connect_s), self._waits.request_s)
        except OSError as error:
            raise Unanswered(f"no connection: {error}") from error


class _Head(NamedTuple):
    status: int
    num_bytes: int


class _Connection:
    """HTTP/1.1 on a socket. is_spent: not for another request."""

    def __init__(self, sock: socket.socket, timeout_s: float):
        self._sock = sock
        self._memory = memoryview(bytearray(_HEAD_BYTES))
        self._ahead = self._memory[:0]  # bytes behind the last head
        self._deadline = 0.0
        self.is_spent = False
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The socket's own timeouts: with Python's, one call would not wait for a whole page.
        sock.settimeout(None)
        wait = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)

    def close(self) -> None:
        self._sock.close()

    @property
    def can_go_on(self) -> bool:
        """Whether the next request can be sent here."""
        return not self.is_spent and not self._ahead

    def send(self, head: str, body: Page, timeout_s: float) -> None:
        """Head and body of a request, whose time begins."""
        self._deadline = time.monotonic() + timeout_s
        left = [memoryview(head.encode("ascii")), *(view.cast("B") for view in body if view.nbytes)]
        while left:
            sent = self._sock.sendmsg(left[:_IOV])
            self._look_at_the_clock()
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def head(self, method: str) -> _Head:
        """Status and body length of the answer, a good one or one that says that nothing is there."""
        used, end = 0, -1
        while end < 0:
            if used == _HEAD_BYTES:
                raise Unanswered("a head of over 8 KiB")
            used += self._received(self._memory[used:], 0)
            raw = bytes(self._memory[:used])
            end = raw.find(b"\r\n\r\n")
        self._ahead = self._memory[end + 4 : used]
        first, *lines = raw[:end].decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if not first.startswith("HTTP/1.1 "):
            raise Unanswered(f"no HTTP/1.1: {first!r:.80}")
        status = int(first.split(" ", 2)[1])
        if status not in (_OK, _NOT_FOUND):
            raise Unanswered(f"the server says {first!r}", status not in _PASSING)
        length = fields.get("content-length")
        lacks_end = length is None and method != "HEAD"
        self.is_spent = lacks_end or fields.get("connection", "").lower() == "close"
        if length is None and status == _OK:
            raise Unanswered("an answer of unknown length")
        return _Head(status, int(length or 0))

    def fill(self, page: Page, num_bytes: int) -> None:
        """The answer's body into the head of `page`."""
        for view in page:
            cells = view.cast("B")[:num_bytes]
            num_bytes -= len(cells)
            done = min(len(self._ahead), len(cells))
            cells[:done] = self._ahead[:done]
            self._ahead = self._ahead[done:]
            while done < len(cells):
                done += self._received(cells[done:], socket.MSG_WAITALL)

    def skip(self, head: _Head) -> None:
        """Past a body that nobody wants."""
        if head.num_bytes > _MOST_SKIPPED:
            self.is_spent = True
        elif not self.is_spent:
            self.fill([memoryview(bytearray(head.num_bytes))], head.num_bytes)

    def _received(self, view: memoryview, flags: int) -> int:
        count = self._sock.recv_into(view, 0, flags)
        if not count:
            raise ConnectionResetError("the server closed the connection")
        self._look_at_the_clock()
        return count

    def _look_at_the_clock(self) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError("the request takes too long")


def reaches(endpoint: str) -> bool:
    """Whether a server is spoken to without TLS, and by no proxy."""
    url = urlsplit(endpoint)
    return url.scheme == "http" and ("http" not in getproxies() or bool(proxy_bypass(url.hostname or "")))
