"""A server of the few S3 requests that pages need, in memory: what it costs is what sockets cost.

Signatures are not looked at, nothing is hashed and nothing is kept. Objects are memory files, sent with
`sendfile` and received in place; a thread for each connection. For measuring clients, and nothing else.

python s3_memory.py PORT       on 127.0.0.1
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from contextlib import suppress
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit

HEAD_BYTES = 1 << 16
_objects: dict[str, tuple[int, int]] = {}  # by path: memory file and length
_lock = threading.Lock()


class Connection:
    """One client's requests, one after the other."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._buffer = b""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def serve(self) -> None:
        with self._sock, suppress(ConnectionError):
            while head := self._head():
                first, *lines = head.split("\r\n")
                method, target, _ = first.split(" ")
                fields = dict(line.lower().split(":", 1) for line in lines)
                self._answer(method, target, fields)

    def _head(self) -> str:
        while b"\r\n\r\n" not in self._buffer:
            got = self._sock.recv(HEAD_BYTES)
            if not got:
                return ""
            self._buffer += got
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        return head.decode("latin-1")

    def _answer(self, method: str, target: str, fields: dict[str, str]) -> None:
        parts = urlsplit(target)
        path = unquote(parts.path)
        length = int(fields.get("content-length", "0"))
        if method == "PUT":
            self._put(path, length, "100-continue" in fields.get("expect", ""))
        elif method == "POST":
            names = re.findall("<Key>([^<]*)</Key>", self._body(length))
            for name in names:
                _forget(f"{path.rstrip('/')}/{name}")
            deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            self._send_text("200 OK", f"<DeleteResult>{deleted}</DeleteResult>")
        elif method == "DELETE":
            _forget(path)
            self._send("204 No Content", 0)
        elif "list-type" in parts.query:
            prefix = f"{path.rstrip('/')}/{parse_qs(parts.query).get('prefix', [''])[0]}"
            self._send_text("200 OK", _listing(prefix, len(path.rstrip("/")) + 1))
        elif path not in _objects:
            self._send_text("404 Not Found", "<Error><Code>NoSuchKey</Code></Error>" * (method == "GET"))
        else:
            fd, size = _objects[path]
            self._send("200 OK", size, more=size if method == "GET" else 0)
            at = 0 if method == "GET" else size
            while at < size:
                at += os.sendfile(self._sock.fileno(), fd, at, size - at)

    def _body(self, size: int) -> str:
        while len(self._buffer) < size:
            self._buffer += self._sock.recv(HEAD_BYTES)
        body, self._buffer = self._buffer[:size], self._buffer[size:]
        return body.decode()

    def _put(self, path: str, size: int, must_agree: bool) -> None:
        if must_agree:
            self._sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        fd = os.memfd_create("object")
        early, self._buffer = self._buffer[:size], self._buffer[size:]
        at = os.write(fd, early)
        piece = memoryview(bytearray(min(size, 1 << 20)))
        while at < size:
            got = self._sock.recv_into(piece, min(len(piece), size - at), socket.MSG_WAITALL)
            if not got:
                raise ConnectionError
            at += os.write(fd, piece[:got])
        with _lock:
            before, _objects[path] = _objects.get(path), (fd, size)
        if before is not None:
            os.close(before[0])
        self._send("200 OK", 0)

    def _send_text(self, status: str, text: str) -> None:
        self._send(status, len(text))
        self._sock.sendall(text.encode())

    def _send(self, status: str, length: int, more: int = 0) -> None:
        now = formatdate(usegmt=True)
        head = f'HTTP/1.1 {status}\r\nContent-Length: {length}\r\nLast-Modified: {now}\r\nETag: "1"\r\n\r\n'
        self._sock.send(head.encode(), socket.MSG_MORE if more else 0)


def _forget(path: str) -> None:
    with _lock:
        fd, _ = _objects.pop(path, (-1, 0))
    if fd >= 0:
        os.close(fd)


def _listing(prefix: str, skip: int) -> str:
    with _lock:
        found = [(path[skip:], size) for path, (_, size) in _objects.items() if path.startswith(prefix)]
    entries = "".join(
        f"<Contents><Key>{key}</Key><Size>{size}</Size><ETag>1</ETag>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for key, size in found
    )
    return (
        '<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated>'
        f"<KeyCount>{len(found)}</KeyCount>{entries}</ListBucketResult>"
    )


def main() -> None:
    server = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=128)
    while True:
        sock, _ = server.accept()
        threading.Thread(target=Connection(sock).serve, daemon=True).start()


if __name__ == "__main__":
    main()
