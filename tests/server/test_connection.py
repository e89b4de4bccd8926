"""Clients that are slow on purpose, over real sockets: each connection has an end, and all have a cap."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from hiradix.server import connection
from hiradix.server import serve as serve_module
from hiradix.server.refusals import REFUSALS, WARN_EVERY_S, Sparing
from tests.server.live import DEADLINE_S, running
from tests.server.scripted import ScriptedService, application, piece

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
BODY = json.dumps({"prompt": "a"}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)


def played(story: Callable[[str, int], Awaitable[None]], service: ScriptedService | None = None) -> None:
    async def play() -> None:
        async with running(application(service or ScriptedService())) as url:
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

    played(story, service)


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
