"""Clients that are slow on purpose, over real sockets: each connection has an end, and all have a cap."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hiradix.apps.server import connection, intake
from hiradix.apps.server import serve as serve_module
from hiradix.apps.server.refusals import REFUSALS, WARN_EVERY_S, Sparing
from tests.server.live import DEADLINE_S, running
from tests.server.scripted import ScriptedService, application, piece

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
BODY = json.dumps({"prompt": "a"}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)


def played(
    story: Callable[[str, int], Awaitable[None]],
    service: ScriptedService | None = None,
    keep_alive_s: float = DEADLINE_S,
) -> None:
    async def play() -> None:
        async with running(application(service or ScriptedService()), keep_alive_s) as url:
            host, port = url.removeprefix("http://").split(":")
            await asyncio.wait_for(story(host, int(port)), DEADLINE_S)

    asyncio.run(play())


async def trickled(writer: asyncio.StreamWriter, byte: bytes) -> None:
    """A byte again and again, until the server has had enough."""
    while True:
        writer.write(byte)
        await writer.drain()
        await asyncio.sleep(0.005)


async def end_of(streams: Streams, trickle: bytes = b"") -> bytes:
    """What comes until the server closes, while `trickle` is sent byte by byte."""
    reader, writer = streams
    sending = asyncio.ensure_future(trickled(writer, trickle) if trickle else asyncio.sleep(0))
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


def late_behind(
    patch: pytest.MonkeyPatch, timeout_s: float, is_there: Callable[[connection.Connection], bool]
) -> None:
    """Heads are late after so long, but not before `is_there`: on a busy machine the test is slow, too."""
    end = connection.Connection._end

    def patient(own: connection.Connection, waited_s: float) -> None:
        if is_there(own):
            end(own, waited_s)
        else:
            own._end_within(waited_s)

    patch.setattr(connection, "HEAD_TIMEOUT_S", timeout_s)
    patch.setattr(connection.Connection, "_end", patient)


def has_asked(own: connection.Connection) -> bool:
    """Its first head is there."""
    return own.cycle is not None


def test_who_sends_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    late = REFUSALS["late"]

    async def story(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        assert await reader.read() == b""
        writer.close()

    played(story)
    assert REFUSALS["late"] == late


@pytest.mark.parametrize("begun", [b"G", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: "])
def test_a_head_that_never_ends_is_given_up(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    late_behind(monkeypatch, 0.2, connection.Connection._has_begun)
    late = REFUSALS["late"]

    async def story(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(begun)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        await end_of(await asyncio.open_connection(host, port), b"a")

    played(story)
    assert REFUSALS["late"] == late + 2


def test_no_http_is_refused_and_counted_whenever_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    """Behind an answer that did not wait for the body it ended in a traceback for each."""
    invalid = REFUSALS["invalid"]

    async def story(host: str, port: int) -> None:
        for _ in range(3):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"\x16\x03\x01 hello\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            writer.close()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 404 ")
        writer.write(b"no chunk\r\n")
        await end_of((reader, writer))

    with caplog.at_level("WARNING"):
        played(story)
    assert REFUSALS["invalid"] == invalid + 4
    assert not [record for record in caplog.records if record.levelname != "WARNING"], caplog.text


def test_warnings_that_clients_cause_are_few(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    logger, sparing = logging.getLogger("clients"), Sparing(lambda: now_s)
    logger.addFilter(sparing)
    for _ in range(1000):
        logger.warning("no HTTP")
    logger.warning("another thing")
    now_s = WARN_EVERY_S
    logger.warning("no HTTP")
    now_s = 2 * WARN_EVERY_S
    logger.warning("no HTTP")
    logger.removeFilter(sparing)
    assert [record.getMessage() for record in caplog.records] == [
        "no HTTP", "another thing", "no HTTP (and 999 more)", "no HTTP"
    ]  # fmt: skip


def test_the_rest_of_a_body_nobody_wants_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes kept the connection from being idle."""
    late_behind(monkeypatch, 0.2, has_asked)

    async def story(host: str, port: int) -> None:
        streams = await asyncio.open_connection(host, port)
        streams[1].write(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        assert (await streams[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 404")
        await end_of(streams, b"a")

    played(story)


def test_a_request_may_take_longer_than_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    late_behind(monkeypatch, 0.05, connection.Connection._is_answering)
    service = ScriptedService(hold=True)

    async def story(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        for _ in range(2):  # on one connection
            writer.write(HEAD)
            await asyncio.sleep(0.1)  # longer than a head may take
            writer.write(BODY)
            await service.asked.wait()
            service.asked.clear()
            await asyncio.sleep(0.1)
            service.stopped.set()
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert b'"abort"' in await reader.readuntil(b"}}}")
        writer.close()

    played(story, service)


def test_connections_have_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 3)

    async def story(host: str, port: int) -> None:
        held = [await asyncio.open_connection(host, port) for _ in range(3)]
        for reader, writer in held:
            writer.write(HEAD + BODY)
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        refused = await end_of(await asyncio.open_connection(host, port))
        assert refused.startswith(b"HTTP/1.1 503") and b"too many connections" in refused
        held[0][1].close()
        await held[0][1].wait_closed()
        while True:  # until the server has seen it
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(HEAD + BODY)
            status = await reader.readuntil(b"\r\n")
            writer.close()
            if b"200" in status:
                break
            assert b"503" in status
        for _, writer in held[1:]:
            writer.close()

    played(story)


def test_connections_leave_files_for_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.resource, "getrlimit", lambda _: (100, 100))
    assert connection.most_connections() == 50
    unlimited = connection.resource.RLIM_INFINITY
    monkeypatch.setattr(connection.resource, "getrlimit", lambda _: (unlimited, unlimited))
    assert connection.most_connections() == connection.MAX_CONNECTIONS


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
@pytest.mark.parametrize("num_pieces", [1, 2000], ids=["ended", "in mid-stream"])
def test_a_client_that_takes_nothing_has_left(num_pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that has been given, but not taken, kept its connection open for ever."""
    monkeypatch.setattr(serve_module, "UNSENT_TIMEOUT_S", 0.5)
    part = replace(piece(""), text="x" * (8_000_000 // num_pieces))
    service = ScriptedService([*[part] * num_pieces, piece("", "stop")])

    lost, see = asyncio.Event(), connection.Connection.connection_lost
    monkeypatch.setattr(
        connection.Connection, "connection_lost", lambda own, error: (see(own, error), lost.set())
    )

    async def story(host: str, port: int) -> None:
        body = json.dumps({"prompt": "a", "stream": True}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (host, port))
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            await loop.sock_sendall(client, head + body)
            await lost.wait()

    played(story, service)


def test_who_takes_an_answer_slowly_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline for the next head cut off what of the answer was not sent yet."""
    late_behind(monkeypatch, 0.05, has_asked)
    monkeypatch.setattr(connection, "CLOSING_S", 0.05)
    service = ScriptedService([replace(piece(""), text="x" * 8_000_000), piece("", "stop")])

    async def story(host: str, port: int) -> None:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, (host, port))
            reader, writer = await asyncio.open_connection(sock=client, limit=1024)
            writer.write(HEAD + BODY)
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.5)  # longer than the next head may take
            assert (await reader.read(-1)).count(b"x") >= 8_000_000
            writer.close()

    played(story, service, 0.05)


@pytest.mark.parametrize("more", [b"\r\n", b"GET /he"], ids=["an empty line", "a request's beginning"])
def test_who_leaves_is_seen_behind_what_he_sent_too_early(more: bytes) -> None:
    service = ScriptedService(hold=True)

    async def story(host: str, port: int) -> None:
        _, writer = await asyncio.open_connection(host, port)
        writer.write(HEAD + BODY)
        await service.asked.wait()
        writer.write(more)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await service.stopped.wait()
        assert service.aborted == [service.requests[0].rid]

    played(story, service)


def test_what_is_sent_too_early_is_not_read_without_end() -> None:
    service = ScriptedService(hold=True)

    async def story(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(HEAD + BODY)
        await service.asked.wait()
        sent = 0
        while writer.transport.get_write_buffer_size() == 0:
            assert sent < 64 << 20, "all of it was read"
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 3000)
            sent += 100_000
            await asyncio.sleep(0.005)
        service.stopped.set()
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        writer.transport.abort()

    played(story, service)


# -- the life of a kept connection --------------------------------------------------------

PROBE = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes = PROBE) -> bytes:
    """The head of the answer to one more request."""
    writer.write(request)
    return await reader.readuntil(b"\r\n\r\n")


def test_an_answer_says_how_long_its_connection_is_kept() -> None:
    async def story(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        assert b"\r\nkeep-alive: timeout=75\r\n" in await asked(reader, writer)
        writer.close()

    played(story, keep_alive_s=connection.KEEP_ALIVE_S)


def test_an_idle_connection_is_kept_for_its_time_and_not_for_a_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with the time for heads, or five seconds after the answer, whatever was said."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    monkeypatch.setattr(connection, "CLOSING_S", 0.1)
    ended: list[float] = []
    end = connection.Connection._end
    monkeypatch.setattr(
        connection.Connection, "_end", lambda own, waited_s: (ended.append(waited_s), end(own, waited_s))
    )

    async def story(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        await asked(reader, writer)
        await asyncio.sleep(0.2)  # longer than a head may take
        await asked(reader, writer)
        assert await reader.read() == b""
        writer.close()

    played(story, keep_alive_s=1.0)
    assert ended == [1.0, 0.1]


def test_a_request_that_meets_the_close_is_answered_and_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CLOSING_S", DEADLINE_S)
    closing, answer_last = asyncio.Event(), connection.Connection._is_kept
    monkeypatch.setattr(connection.Connection, "_is_kept", lambda own: (closing.set(), answer_last(own))[1])

    async def story(host: str, port: int) -> None:
        for request, part in ((PROBE, b"200 OK"), (HEAD + BODY, b"Hello!")):
            closing.clear()
            reader, writer = await asyncio.open_connection(host, port)
            assert b"connection: close" not in await asked(reader, writer)
            await closing.wait()
            writer.write(request[:9])
            await asyncio.sleep(0.02)
            writer.write(request[9:])
            last = await reader.read()
            assert b"connection: close" in last and part in last
            writer.close()

    played(story, keep_alive_s=0.05)


def test_who_sends_again_and_again_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections whose pauses end around the keep-alive time; a client goes by `connection: close` alone."""
    monkeypatch.setattr(connection, "CLOSING_S", DEADLINE_S)

    async def ask_often(host: str, port: int, number: int) -> int:
        reader, writer = await asyncio.open_connection(host, port)
        num_answers = 0
        for turn in range(20):
            head = await asked(reader, writer)
            num_answers += head.startswith(b"HTTP/1.1 200")
            if b"connection: close" in head:
                writer.close()
                reader, writer = await asyncio.open_connection(host, port)
            await asyncio.sleep(0.04 + 0.001 * ((number + turn) % 20))
        writer.close()
        return num_answers

    async def story(host: str, port: int) -> None:
        answers = await asyncio.gather(*(ask_often(host, port, number) for number in range(20)))
        assert sum(answers) == 20 * 20

    played(story, keep_alive_s=0.05)


# -- heads that two readers may read differently --------------------------------------------

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
AMBIGUOUS = [
    POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    POST + b"content-length: 5\r\ncontent-length: 5\r\n\r\nabcde",
    POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcde",
    POST + b"content-length: 5, 6\r\n\r\nabcde",
    POST + b"content-length: 5, 5\r\n\r\nabcde",
    POST + b"content-length: +5\r\n\r\nabcde",
    POST + b"content-length: 5_0\r\n\r\nabcde",
    POST + b"content-length: -5\r\n\r\nabcde",
    POST + b"content-length: 0x5\r\n\r\nabcde",
    POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    POST + b"x-folded: a\r\n b\r\ncontent-length: 2\r\n\r\n{}",
    POST + b"x-folded: a\r\n\tcontent-length: 2\r\n\r\n{}",
    POST + b"content-length\r\n: 2\r\n\r\n{}",
    POST + b"host: y\r\ncontent-length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"x: a\x00b\r\ncontent-length: 2\r\n\r\n{}",
    POST + b"x: a\rb\r\ncontent-length: 2\r\n\r\n{}",
    CHUNKED + b"5 \x00\r\nabcde\r\n0\r\n\r\n",
    CHUNKED + b"0x5\r\nabcde\r\n0\r\n\r\n",
    CHUNKED + b"+5\r\nabcde\r\n0\r\n\r\n",
    CHUNKED + b"-5\r\nabcde\r\n0\r\n\r\n",
    CHUNKED + b"fffffffffffffffffffffffff\r\nabcde\r\n0\r\n\r\n",
    CHUNKED + b"5\r\nabcdeX\r\n0\r\n\r\n",
]


@pytest.mark.parametrize("sent", AMBIGUOUS)
def test_what_may_be_read_in_two_ways_ends_the_connection(sent: bytes) -> None:
    """A second request behind it is answered to nobody: whose would it be?"""
    service = ScriptedService()

    async def story(host: str, port: int) -> None:
        for before in (b"", PROBE):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(before + sent + PROBE)
            answers = await reader.read()
            if before:
                assert answers.startswith(b"HTTP/1.1 200")
                answers = answers[answers.index(b"HTTP/1.1", 9) :]
            assert answers.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501")) and answers.count(b"HTTP/1.1") == 1
            writer.close()

    played(story, service)
    assert service.requests == []


def test_plain_heads_are_read() -> None:
    async def story(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
        for request in (HEAD + BODY, CHUNKED + chunks, POST.replace(b"\r", b"") + b"content-length: 2\n\n{}"):
            head = await asked(reader, writer, request)
            assert head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400")) and b"connection: close" not in head
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None
            await reader.readexactly(int(length[1]))
        writer.close()

    played(story)


@pytest.mark.parametrize("num_bytes", [connection.MAX_HEAD_BYTES - 100, connection.MAX_HEAD_BYTES + 1])
@pytest.mark.parametrize("ends", [True, False])
def test_heads_have_a_longest(num_bytes: int, ends: bool) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: "
    head += b"a" * (num_bytes - len(head))

    async def story(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        is_over = num_bytes > connection.MAX_HEAD_BYTES
        if not ends and not is_over:
            writer.write(head)
            await asyncio.sleep(0.02)
            assert (await asked(reader, writer, b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        else:
            told = await asked(reader, writer, head + (b"\r\n\r\n" if ends else b""))
            assert told.startswith(b"HTTP/1.1 431" if is_over else b"HTTP/1.1 200")
        writer.close()

    played(story)


def test_a_body_that_is_too_long_or_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(intake, "BODY_TIMEOUT_S", 0.1)

    async def story(host: str, port: int) -> None:
        for length, sent, status in ((1001, b" " * 1001, b"413"), (100, b"{", b"408")):
            reader, writer = await asyncio.open_connection(host, port)
            head = await asked(reader, writer, POST + b"content-length: %d\r\n\r\n" % length + sent)
            assert head.startswith(b"HTTP/1.1 " + status)
            writer.close()

    played(story)


def test_the_page_has_the_numbers() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "http-api.md").read_text().split())
    page = page[page.index("## Connections") : page.index("## Stopping")]
    for number in (
        f"within {connection.HEAD_TIMEOUT_S:g} s",
        f"kept for {connection.KEEP_ALIVE_S:g} s",
        f"{connection.CLOSING_S:g} s more",
        f"{connection.MAX_HEAD_BYTES // 1024} KiB",
        f"{intake.BODY_TIMEOUT_S:g} s",
        f"{intake.MAX_BODY_BYTES >> 20} MiB",
        f"{serve_module.UNSENT_TIMEOUT_S:g} s",
        f"{connection.MAX_CONNECTIONS} connections",
    ):
        assert number in page, number
