"""Sends again what subscribers have missed: whole, with its end, and at each subscriber's own pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import zmq

END = (-1).to_bytes(8, "big", signed=True)
RETRY_MS = 50  # replays that do not fit a subscriber's queue are tried again so often
MAX_WAITING = 16
"""Replays that one subscriber may wait for; what he asks for beyond is not answered."""

Kept = Callable[[int], list[tuple[int, bytes]]]
"""The messages that are kept from a number on: their numbers and payloads."""


class Replays:
    """Answers requests that come to `router`, a bound ROUTER socket, until its context ends. One thread.

    topic: in front of every message, b"" of the end; None for the old form, which has none.
    """

    def __init__(self, router: zmq.Socket[bytes], kept: Kept, topic: bytes | None):
        router.set(zmq.ROUTER_MANDATORY, 1)  # a full queue is said, and nothing left out
        self._router, self._kept, self._topic = router, kept, topic
        self._waiting: dict[bytes, deque[Iterator[list[bytes]]]] = {}
        self._unsent: dict[bytes, list[bytes]] = {}

    @property
    def num_waiting(self) -> int:
        """Subscribers that are not done. Any thread."""
        return len(self._waiting)

    def serve(self) -> None:
        """Read requests and answer them; returns, with the socket closed, when the context ends."""
        try:
            while True:
                if not self._waiting or self._router.poll(RETRY_MS):
                    self._take(self._router.recv_multipart())
                for who in list(self._waiting):
                    self._send(who)
        except zmq.ContextTerminated:
            pass
        finally:
            self._router.close()

    def _take(self, request: list[bytes]) -> None:
        if len(request) == 3 and len(request[2]) == 8:
            asked = self._waiting.setdefault(request[0], deque())
            if len(asked) < MAX_WAITING:
                asked.append(self._messages(request[0], int.from_bytes(request[2], "big")))

    def _messages(self, who: bytes, first: int) -> Iterator[list[bytes]]:
        topic, no_topic = ([], []) if self._topic is None else ([self._topic], [b""])
        for number, payload in self._kept(first):
            yield [who, b"", *topic, number.to_bytes(8, "big"), payload]
        yield [who, b"", *no_topic, END, b""]

    def _send(self, who: bytes) -> None:
        """Send as many of the awaited messages as the subscriber's queue takes."""
        asked = self._waiting[who]
        try:
            while asked:
                message = self._unsent.pop(who, None) or next(asked[0], None)
                if message is None:
                    asked.popleft()
                    continue
                self._unsent[who] = message
                self._router.send_multipart(message, zmq.NOBLOCK)
                del self._unsent[who]
        except zmq.Again:
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # he has left
                raise
            self._unsent.pop(who, None)
        del self._waiting[who]
