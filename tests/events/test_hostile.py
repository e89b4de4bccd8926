"""What clients send to the publisher's sockets, and which threads touch them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("radixview")

import zmq

from hiradix.events.replays import Replays
from hiradix.tree import RadixKey, RadixTree
from tests.events.subscriber import DEADLINE_S
from tests.events.test_names import insert
from tests.events.test_publisher import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(RadixTree(4))
    yield rig
    rig.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def stranger(rig: Rig, context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket of somebody who knows the replay socket's port."""
    socket = context.socket(kind)
    socket.connect(f"tcp://127.0.0.1:{rig.publisher.describe(4)['replay_endpoint_port_base']}")
    return socket


class OneThread:
    """A socket that only the thread which first sends or receives on it may touch."""

    def __init__(self, socket: Any):
        self._socket = socket
        self._owner: int | None = None
        self.others: list[str] = []

    def __getattr__(self, name: str) -> Any:
        me = threading.get_ident()
        self._owner = self._owner or me
        if me != self._owner:
            self.others.append(name)
        return getattr(self._socket, name)


def test_where_the_sockets_are_is_told_without_touching_them() -> None:
    """ZeroMQ's sockets belong to one thread each; to read an option from another is undefined."""
    rig = Rig(RadixTree(4))
    publisher = rig.publisher
    sockets = publisher._pub, publisher._router
    watched = [OneThread(socket) for socket in sockets]
    for one in watched:
        one._owner = publisher._threads[0].ident
    publisher._pub, publisher._router = watched
    told = publisher.describe(4)
    publisher._pub, publisher._router = sockets
    assert [one.others for one in watched] == [[], []]
    rig.close()
    assert publisher.describe(4) == told, "a server that ends is still asked for its information"


NONSENSE = (
    *([], [b""], [b"", b""], [b"", b"", b""], [b"x"], [b"x", bytes(8)], [b"", b"7"], [b"", bytes(7)]),
    *([b"", bytes(9)], [b"", bytes(8), b""], [b"", bytes(4096)], [bytes(8)] * 64, [b"", bytes(1 << 20)]),
    *([bytes(1 << 20)], [b"x", bytes(1 << 20)], [b""] * 2000),
)


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ, zmq.ROUTER])
def test_whatever_comes_to_the_replay_socket_others_are_answered(
    rig: Rig, context: zmq.Context[zmq.Socket[bytes]], kind: int
) -> None:
    insert(rig.tree, RadixKey(range(1, 9)))
    rig.publisher.flush()
    rig.settled()
    for frames in NONSENSE:
        socket = stranger(rig, context, kind)
        if kind == zmq.ROUTER:
            frames = [b"nobody", *frames]
        if frames:
            socket.send_multipart(frames, zmq.NOBLOCK)
        assert rig.subscriber.replay(0) == [0]
        socket.close(linger=DEADLINE_S * 1000)
    assert all(thread.is_alive() for thread in rig.publisher._threads)


@pytest.mark.parametrize("number", [-1, -(2**63), 2**63 - 1, 1])
def test_a_number_that_never_was_is_answered_with_the_end(
    rig: Rig, context: zmq.Context[zmq.Socket[bytes]], number: int
) -> None:
    insert(rig.tree, RadixKey(range(1, 9)))
    rig.publisher.flush()
    rig.settled()
    dealer = stranger(rig, context, zmq.DEALER)
    dealer.send_multipart([b"", number.to_bytes(8, "big", signed=True)])
    assert dealer.poll(DEADLINE_S * 1000)
    assert dealer.recv_multipart() == [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]


def test_what_is_too_long_to_be_a_request_is_not_read(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame of any length would be kept in memory, from every client that sends some."""
    seen, take = [], Replays._take

    def watched(replays: Replays, request: list[bytes]) -> None:
        seen.append(max(map(len, request)))
        take(replays, request)

    monkeypatch.setattr(Replays, "_take", watched)
    rig = Rig(RadixTree(4))
    dealer = stranger(rig, context, zmq.DEALER)
    dealer.send_multipart([b"", bytes(1 << 20)])
    while not dealer.poll(100):  # what is sent before the connection is ended is lost with it
        dealer.send_multipart([b"", bytes(8)])
    assert rig.subscriber.replay(0) == []
    rig.close()
    assert max(seen) == 8
