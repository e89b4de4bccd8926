"""Sends events over ZeroMQ: a PUB socket for everybody, a ROUTER socket for who has missed something.

    scheduler --flush, once per step--> queue --> sender: name, encode, send, keep the last messages
                                        requests --> replayer: send kept messages again

A message is (topic, sequence number, payload); numbers count up from 0. A subscriber that is too slow loses
messages, sees the gap and asks for a replay. When the sender is too slow, nothing is queued until it has
caught up, and then all blocks are published anew, after `AllBlocksCleared`: nobody is left with a wrong picture.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import zmq

from hiradix.errors import ConfigError
from hiradix.events.config import FLAG, WILDCARDS, KVEventsConfig, split_tcp
from hiradix.events.encode import encoder
from hiradix.events.recorder import KVEvents, TierChange
from hiradix.events.replays import Replays

logger = logging.getLogger(__name__)

LINGER_MS = 500  # what was sent may take so long to leave when the publisher closes
MOST_FROM_CLIENTS = 64 * 1024  # bytes of a frame: a topic, a number; who sends more is disconnected
RANK = 0  # of the data-parallel replica: there is one


class Publisher:
    """Sends events to subscribers over ZeroMQ. Owns its sockets and threads; `flush` and `close` are the
    scheduler's.

    host: the address that stands for `*`. Raises ConfigError naming the key of an endpoint it cannot have.
    num_queued, num_done, num_dropped: steps given to the sender, those it is done with, and those that could
    not be queued. num_sent: messages.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        events: KVEvents,
        host: str = "*",
        clock: Callable[[], float] = time.time,
    ):
        self.config, self._events, self._clock = config, events, clock
        self.num_queued = self.num_done = self.num_sent = self.num_dropped = 0
        self._queue: SimpleQueue[tuple[float, list[TierChange]] | None] = SimpleQueue()
        self._is_behind = False
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._lock = threading.Lock()  # of _kept
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ports: dict[str, int | None] = {}  # of endpoints; later only one thread may ask
        try:
            self._pub = self._open(zmq.PUB, "endpoint", config.hwm, host)
            self._router = self._replays = None
            if config.replay_endpoint is not None:
                self._router = self._open(zmq.ROUTER, "replay_endpoint", config.buffer_steps + 2, host)
                topic = None if config.encoding == "array" else config.topic.encode()
                self._replays = Replays(self._router, self._kept_from, topic)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        targets = [self._send_all] if self._replays is None else [self._send_all, self._replays.serve]
        self._threads = [threading.Thread(target=t, name="hiradix-events", daemon=True) for t in targets]
        for thread in self._threads:
            thread.start()

    def _open(self, kind: int, key: str, hwm: int, host: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, hwm)
        socket.set(zmq.LINGER, LINGER_MS)
        socket.set(zmq.MAXMSGSIZE, MOST_FROM_CLIENTS)
        endpoint = str(getattr(self.config, key))
        tcp = split_tcp(endpoint)
        address = endpoint
        if tcp is not None:
            at = host if tcp[0] == "*" else tcp[0]
            at = f"[{at}]" if ":" in at and not at.startswith("[") else at
            address = f"tcp://{at}:{tcp[1] or '*'}"
            socket.set(zmq.IPV6, ":" in at)
        binds = kind == zmq.ROUTER or self._binds(tcp)
        try:
            (socket.bind if binds else socket.connect)(address)
        except zmq.ZMQError as error:
            verb = "bind" if binds else "connect to"
            raise ConfigError(f"{FLAG}: {key}: cannot {verb} {address}: {error.strerror}") from error
        self._ports[key] = _port(socket)
        return socket

    def _binds(self, tcp: tuple[str, int] | None) -> bool:
        return self.config.bind if self.config.bind is not None else tcp is None or tcp[0] in WILDCARDS

    def describe(self, block_size: int) -> dict[str, Any] | None:
        """The sockets as `/server_info` shows them to subscribers; None if these cannot reach them. Any
        thread."""
        tcp = split_tcp(self.config.endpoint)
        if tcp is None:
            return None
        found = {
            "publisher": self.config.publisher,
            "endpoint_host": tcp[0],
            "endpoint_port_base": self._ports["endpoint"] or tcp[1],
            "topic": self.config.topic,
            "block_size": block_size,
            "dp_size": 1,
        }
        if (port := self._ports.get("replay_endpoint")) is not None:
            found["replay_endpoint_port_base"] = port
        return found

    def figures(self) -> dict[str, int]:
        """Counts since the start, and what waits to be sent. Any thread."""
        waiting = self.num_queued - self.num_done
        return {"num_sent": self.num_sent, "num_waiting": waiting, "num_dropped": self.num_dropped}

    # -- the scheduler's thread ---------------------------------------------------------------

    def flush(self) -> None:
        """Hand over what was noted since the last call; never waits."""
        limit = self.config.max_queue_size
        if self._is_behind:
            self._events.take_changes()
            if self._queue.qsize() > limit // 2:
                return
            self._is_behind = False
            self._events.resync()
        changes = self._events.take_changes()
        if not changes:
            return
        if self._queue.qsize() < limit:
            self.num_queued += 1
            self._queue.put((self._clock(), changes))
            return
        self._is_behind = True
        self.num_dropped += 1
        logger.warning("%s: %d steps wait to be sent; all blocks will be published anew", FLAG, limit)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is queued and end, within the deadline."""
        self._queue.put(None)
        sender = self._threads[0]
        sender.join(timeout_s)
        if sender.is_alive():
            logger.warning("%s: events are still being sent; they are left", FLAG)
            return
        self._context.term()  # ends the replayer's wait
        for thread in self._threads[1:]:
            thread.join(timeout_s)

    # -- the sender's thread ------------------------------------------------------------------

    def _send_all(self) -> None:
        encode = encoder(self.config.encoding)
        try:
            while (item := self._queue.get()) is not None:
                time_s, changes = item
                try:
                    if events := self._events.events_of(changes):
                        self._send(encode(time_s, events, RANK))
                except Exception:  # serving goes on; what could not be published is published anew
                    logger.exception("%s: a message could not be sent", FLAG)
                    self._is_behind = True
                self.num_done += 1
        finally:
            self._pub.close()

    def _send(self, payload: bytes) -> None:
        with self._lock:
            number = self.num_sent
            self._kept.append((number, payload))
            self.num_sent += 1
        self._pub.send_multipart((self.config.topic.encode(), number.to_bytes(8, "big"), payload))

    def _kept_from(self, first: int) -> list[tuple[int, bytes]]:
        """The kept messages from number `first` on. Any thread."""
        with self._lock:
            return [message for message in self._kept if message[0] >= first]


def _port(socket: zmq.Socket[bytes]) -> int | None:
    """The TCP port a socket has bound."""
    last = socket.get(zmq.LAST_ENDPOINT)
    tcp = split_tcp(last.decode().rstrip("\0")) if isinstance(last, bytes) else None
    return None if tcp is None else tcp[1]
