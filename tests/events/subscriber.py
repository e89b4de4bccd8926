"""A subscriber that loses nothing: what it missed, it asks for again. How a router should do it."""

from __future__ import annotations

import time
from typing import Any

import zmq
from radixview.wire import decode_multipart

from hiradix.events import AllBlocksCleared, BlockRemoved, BlockStored, Event

DEADLINE_S = 60.0


class Subscriber:
    """Reads a publisher that `/server_info` describes; `batches` are the events by sequence number.

    is_old: the publisher sends arrays, and replays without a topic.
    """

    def __init__(self, described: dict[str, Any], is_old: bool = False):
        self.batches: dict[int, list[Event]] = {}
        self._is_old = is_old
        self._context = zmq.Context()
        self._sub = self._connect(zmq.SUB, described["endpoint_port_base"])
        self._sub.set(zmq.SUBSCRIBE, described["topic"].encode())
        self._replay = self._connect(zmq.DEALER, described["replay_endpoint_port_base"])

    def _connect(self, kind: int, port: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.set(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        socket.connect(f"tcp://127.0.0.1:{port}")
        return socket

    def close(self) -> None:
        self._context.destroy(linger=0)

    def live(self, timeout_s: float = DEADLINE_S) -> int | None:
        """Read one message as it is published; its number, None if there was none."""
        if not self._sub.poll(timeout_s * 1000):
            return None
        return self._note(self._sub.recv_multipart())

    def replay(self, first: int) -> list[int]:
        """Ask for all messages from `first` on; their numbers."""
        self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        numbers = []
        while True:
            empty, *frames = self._replay.recv_multipart()
            assert empty == b""
            if frames[-1] == b"":
                assert int.from_bytes(frames[-2], "big", signed=True) == -1
                assert len(frames) == 2 if self._is_old else frames[0] == b"" and len(frames) == 3
                return numbers
            numbers.append(self._note(([b""] if self._is_old else []) + frames))

    def catch_up(self, num_messages: int) -> list[Event]:
        """All events of the first `num_messages` messages, whatever was missed."""
        until = time.monotonic() + DEADLINE_S
        while missing := set(range(num_messages)) - set(self.batches):
            assert time.monotonic() < until, f"messages {missing} never came"
            self.replay(min(missing))
        return [event for number in range(num_messages) for event in self.batches[number]]

    def _note(self, frames: list[bytes]) -> int:
        batch = decode_multipart(frames)
        assert batch.attn_dp_rank == 0 and batch.ts > 0
        self.batches[batch.seq] = [event_of(event) for event in batch.events]
        return batch.seq


def event_of(fields: dict[str, Any]) -> Event:
    """An event as radixview decodes it, as one of ours."""
    fields = dict(fields)
    kind = fields.pop("type")
    if kind == "BlockStored":
        fields["token_ids"] = [tuple(t) if isinstance(t, list) else t for t in fields["token_ids"]]
        return BlockStored(**fields)
    return BlockRemoved(**fields) if kind == "BlockRemoved" else AllBlocksCleared(**fields)
