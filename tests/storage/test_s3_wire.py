"""S3 requests on our own sockets, against a server that answers what a test says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import IO

import pytest

from hiradix.storage import s3_wire
from hiradix.storage.s3_wire import Unanswered, Waits, Wire, reaches

BODY = bytes(range(256)) * 40
PATIENT = Waits(5.0, 30.0)


def answer(status: str, body: bytes = b"", *fields: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


class Server:
    """Gives the next of `answers` for each request, whatever it was; an empty one closes the connection.

    An answer of several parts is sent part by part. Without one it keeps still.
    """

    def __init__(self) -> None:
        self.answers: list[Sequence[bytes]] = []
        self.requests: list[bytes] = []
        self.num_connections = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with sock, sock.makefile("rb") as lines, suppress(ConnectionError):
            while head := self._head(lines):
                lengths = [int(line.split()[1]) for line in head if line.startswith(b"Content-Length")]
                length = lengths[0] if lengths else 0
                self.requests.append(b"".join(head) + lines.read(length))
                if not self.answers:
                    continue
                parts = self.answers.pop(0)
                for part in parts:
                    sock.sendall(part)
                if not parts:
                    return

    @staticmethod
    def _head(lines: IO[bytes]) -> list[bytes]:
        head: list[bytes] = []
        while line := lines.readline():
            head.append(line)
            if line == b"\r\n":
                return head
        return []

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


Make = Callable[..., Wire]


@pytest.fixture
def make(server: Server) -> Iterator[Make]:
    made: list[Wire] = []

    def build(waits: Waits = PATIENT) -> Wire:
        root = f"http://{server.address}/pages"
        made.append(Wire(lambda method, path: f"{root}/{path}?for={method}&a=%2F", waits))
        return made[-1]

    yield build
    for wire in made:
        wire.close()


def blank(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def content(page: Sequence[memoryview]) -> bytes:
    return b"".join(page)


@pytest.mark.parametrize("sizes", [[len(BODY)], [1, 5000, len(BODY) - 5001], [len(BODY), 0]])
@pytest.mark.parametrize("step", [1, 7, 300, 10**6])
def test_pages_arrive_whatever_pieces_they_come_in(
    server: Server, make: Make, sizes: list[int], step: int
) -> None:
    whole = answer("200 OK", BODY)
    parts = [whole[at : at + step] for at in range(0, min(len(whole), 200 * step), step)]
    parts.append(whole[200 * step :])
    server.answers = [[part for part in parts if part]]
    page = blank(*sizes)
    assert make().get("x/key", page, False) and content(page) == BODY
    head = server.requests[0].split(b"\r\n")
    assert head[0] == b"GET /pages/x/key?for=GET&a=%2F HTTP/1.1"
    assert f"Host: {server.address}".encode() in head


def test_connections_are_kept(server: Server, make: Make) -> None:
    heads = [b"HTTP/1.1 404 Not Found\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n"]
    bodies = [answer("200 OK", BODY), answer("404 Not Found", b"<Error/>"), answer("200 OK")]
    server.answers = [[raw] for raw in (*bodies, *heads)]
    wire, page = make(), blank(len(BODY))
    assert wire.get("a", page, False) and not wire.get("b", page, False)
    wire.put("c", [memoryview(BODY)])
    assert wire.size("d") is None and wire.size("e") == 77
    assert server.num_connections == 1 and server.requests[2].endswith(b"\r\n\r\n" + BODY)


def test_threads_have_connections_of_their_own(server: Server, make: Make) -> None:
    wire, pages = make(), [blank(len(BODY)) for _ in range(3)]
    threads = [threading.Thread(target=wire.get, args=(f"{i}", page, False)) for i, page in enumerate(pages)]
    server.answers = [[answer("200 OK", BODY)] for _ in threads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [content(page) for page in pages] == [BODY] * 3


def test_long_pages_are_sent_whole(server: Server, make: Make) -> None:
    body = BODY * 2000  # 20 MB: more than a socket takes at once
    server.answers = [[answer("200 OK")]]
    pieces = [memoryview(body)[at : at + 7001] for at in range(0, len(body), 7001)]
    make().put("x", pieces)
    assert server.requests[0].endswith(body)


@pytest.mark.parametrize(
    ("size", "ragged", "found"), [(100, False, False), (100, True, True), (10241, True, False)]
)
def test_object_of_another_length(server: Server, make: Make, size: int, ragged: bool, found: bool) -> None:
    server.answers = [[answer("200 OK", (BODY * 2)[:size])], [answer("200 OK", BODY)]]
    wire, page = make(), blank(len(BODY))
    assert wire.get("a", page, ragged) is found
    assert content(page)[:100] == (BODY[:100] if found else bytes(100))
    assert wire.get("b", page, ragged) and content(page) == BODY


@pytest.mark.parametrize(
    ("status", "is_refusal"),
    [
        ("403 Forbidden", True), ("301 Moved", True), ("501 Not Implemented", True), ("206 Partial", True),
        ("503 Slow Down", False), ("500 Oops", False), ("429 Too Many", False),
    ],
)  # fmt: skip
def test_what_is_no_answer(server: Server, make: Make, status: str, is_refusal: bool) -> None:
    server.answers = [[answer(status, BODY)] for _ in range(3)]
    wire, page = make(), blank(len(BODY))
    for ask in (lambda: wire.get("a", page, False), lambda: wire.put("a", page), lambda: wire.size("a")):
        with pytest.raises(Unanswered) as raised:
            ask()
        assert raised.value.is_refusal is is_refusal
    assert server.num_connections == 3, "nothing is asked where an unread body may follow"


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
    ],
)
def test_answers_that_the_library_is_to_make_sense_of(server: Server, make: Make, raw: bytes) -> None:
    server.answers = [[raw], [answer("200 OK", BODY)]]
    wire, page = make(), blank(len(BODY))
    with pytest.raises(Unanswered) as raised:
        wire.get("a", page, False)
    assert not raised.value.is_refusal and wire.get("a", page, False)


def test_connection_that_was_closed_meanwhile(server: Server, make: Make) -> None:
    server.answers = [[], [answer("200 OK", BODY)], [], [answer("200 OK", BODY)]]
    wire, page = make(), blank(len(BODY))
    for good in (False, True, False, True):
        if good:
            assert wire.get("a", page, False)
        else:
            with pytest.raises(Unanswered):
                wire.get("a", page, False)


def test_body_that_ends_early(server: Server, make: Make) -> None:
    server.answers = [[answer("200 OK", BODY, "Connection: close")[:-1]]]
    wire, page = make(Waits(5.0, 0.2)), blank(len(BODY))
    with pytest.raises(TimeoutError):
        wire.get("a", page, False)


def test_more_than_was_said_costs_the_connection(server: Server, make: Make) -> None:
    server.answers = [[answer("200 OK", BODY[:50]) + b"HTTP/1.1 200 OK\r\n"], [answer("200 OK", BODY)]]
    wire, page = make(), blank(len(BODY))
    assert wire.get("a", page[:0] + [page[0][:50]], False)
    assert wire.get("b", page, False) and content(page) == BODY and server.num_connections == 2


def test_server_that_says_close_is_believed(server: Server, make: Make) -> None:
    server.answers = [[answer("200 OK", BODY, "Connection: close")], [answer("200 OK", BODY)]]
    wire, page = make(), blank(len(BODY))
    assert wire.get("a", page, False) and wire.get("b", page, False) and server.num_connections == 2


def test_silence_ends_in_time_and_costs_the_connection(server: Server, make: Make) -> None:
    wire, page = make(Waits(5.0, 0.05)), blank(len(BODY))
    with pytest.raises(TimeoutError):
        wire.get("a", page, False)
    server.answers = [[answer("200 OK", BODY)]]
    patient = make()
    assert patient.get("b", page, False) and content(page) == BODY and server.num_connections == 2


def test_a_server_that_drips_is_left_in_time(
    server: Server, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, *(float(second) for second in range(10_000))])
    monkeypatch.setattr(s3_wire.time, "monotonic", lambda: next(now))
    whole = answer("200 OK", BODY)
    server.answers = [[whole[at : at + 1] for at in range(len(whole))]]
    with pytest.raises(TimeoutError):
        make(Waits(5.0, 2.0)).get("a", blank(len(BODY)), False)


def test_nobody_listens(server: Server, make: Make) -> None:
    server.close()
    with pytest.raises(Unanswered):
        make().size("a")


def test_nothing_is_kept_after_close(server: Server, make: Make) -> None:
    server.answers = [[answer("200 OK", BODY)], [answer("200 OK", BODY)]]
    wire, page = make(), blank(len(BODY))
    assert wire.get("a", page, False)
    wire.close()
    wire.close()
    assert wire.get("a", page, False) and server.num_connections == 2 and not wire._idle


@pytest.mark.parametrize(
    ("endpoint", "proxies", "good"),
    [
        ("http://10.0.0.7:9000", {}, True),
        ("https://10.0.0.7:9000", {}, False),
        ("", {}, False),
        ("http://10.0.0.7:9000", {"http_proxy": "http://p:3128"}, False),
        ("http://10.0.0.7:9000", {"http_proxy": "http://p:3128", "no_proxy": "10.0.0.7"}, True),
        ("http://10.0.0.7:9000", {"https_proxy": "http://p:3128"}, True),
    ],
)
def test_which_servers_are_spoken_to(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, proxies: dict[str, str], good: bool
) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in proxies.items():
        monkeypatch.setenv(name, value)
    assert reaches(endpoint) is good
