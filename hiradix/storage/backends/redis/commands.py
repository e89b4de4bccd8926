"""The commands pages need, in two ways: straight on a connection's socket, or through redis-py."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import redis

from hiradix.errors import StorageError
from hiradix.storage.backends.redis.link import CLIENT_FAULTS
from hiradix.storage.backends.redis.resp import NIL, Frame, ReplyError, RespStream, encode_around, number_in
from hiradix.storage.kit.call_threads import fill_head
from hiradix.storage.kit.in_place import InPlacePage
from hiradix.storage.protocol import Page, fits, page_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")
REFUSED = re.compile(rb"-?(?:OOM|MISCONF|NOREPLICAS|READONLY)\b")
Found = tuple[int, bool | None]
"""Bytes that were stored under a name, and what `set` says of it; None: nothing was changed."""
LOG_AGAIN_S = 600.0
_MOVED = ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN")


class Refusals:
    """Writes that the server refuses, while reads go on: known by the first word of its answer, each at most
    once in ten minutes. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._logged_until_s: dict[str, float] = {}

    def is_stored(self, reply: Any) -> bool:
        """Whether a reply to SET says that the value is stored. Raises ReplyError if it is neither stored nor
        refused."""
        if reply in (b"+OK", b"OK") or reply is True:
            return True
        text = _error_text(reply)
        if self.is_one(text):
            return False
        raise ReplyError(text)

    def is_one(self, text: str) -> bool:
        """Whether that error is one; if so, it is logged."""
        if REFUSED.match(text.encode()) is None:
            return False
        code, now_s = text.lstrip("-").partition(" ")[0], self._clock()
        if now_s >= self._logged_until_s.get(code, now_s):
            self._logged_until_s[code] = now_s + LOG_AGAIN_S
            logger.warning("the redis server refuses pages: %.200s", text)
        return True


class SocketCommands:
    """One round trip a method: payload between the socket and the pages, no copy in between but that of a
    `InPlacePage`. Raises StorageError, OSError or redis.RedisError.

    ragged: values shorter than their page are read into its head.
    client: a `redis.Redis` or `RedisCluster`; its pools give the connections, connected and authenticated.
    After a fault of a cluster's node the next call asks first who has its slots; a server that became a
    replica is left, whichever command it refused.
    """

    def __init__(self, client: Any, ragged: bool = False, refusals: Refusals | None = None):
        self._client = client
        self._ragged = ragged
        self._refusals = refusals or Refusals()
        self._is_cluster = isinstance(client, redis.RedisCluster)
        self._is_outdated = False
        self._fallback = ClientCommands(client, ragged, self._refusals)

    def lengths(self, names: Sequence[bytes]) -> list[int]:
        """Bytes stored under each name; 0 where there is nothing, or no string."""
        return self._numbers(names, [(b"STRLEN", name) for name in names])

    def renew(self, names: Sequence[bytes], ttl_ms: int) -> list[bool]:
        """Let each live `ttl_ms` from now. False: there is nothing of that name."""
        commands = [_renew_command(name, ttl_ms) for name in names]
        return [number == 1 for number in self._numbers(names, commands)]

    def _numbers(self, names: Sequence[bytes], commands: Sequence[Sequence[bytes]]) -> list[int]:
        def ask(stream: RespStream, which: Sequence[int]) -> list[int]:
            return [_number(reply) for reply in stream.lines([commands[index] for index in which])]

        return self._each_node(names, ask, lambda: self._fallback.numbers(commands))

    def get(self, names: Sequence[bytes], pages: Sequence[Page], ttl_ms: int) -> list[bool]:
        """Fill the pages whose stored length is theirs; with `ttl_ms` a hit lives that much longer."""

        def ask(stream: RespStream, which: Sequence[int]) -> list[bool]:
            commands = [_get_command(names[index], ttl_ms) for index in which]
            return stream.get_into(commands, [pages[index] for index in which], self._ragged)

        return self._each_node(names, ask, lambda: self._fallback.get(names, pages, ttl_ms))

    def set(self, names: Sequence[bytes], pages: Sequence[Page], options: Sequence[bytes]) -> list[bool]:
        """SET with `options`. False: the server has no room, or takes no writes now."""

        def ask(stream: RespStream, which: Sequence[int]) -> list[bool]:
            frames = [_set_frame(names[index], pages[index], options) for index in which]
            return list(map(self._refusals.is_stored, stream.set_from(frames)))

        return self._each_node(names, ask, lambda: self._fallback.set(names, pages, options))

    def set_missing(
        self, names: Sequence[bytes], pages: Sequence[Page], options: Sequence[bytes], unasked_bytes: int
    ) -> list[Found]:
        """Put pages of which the server has no value of their length; otherwise like `set`. About
        `unasked_bytes` of the first may be sent before that is known; these replace no value, whatever its
        length."""

        def ask(stream: RespStream, which: Sequence[int]) -> list[Found]:
            questions = [(b"STRLEN", names[index]) for index in which]
            num_unasked = _leading([page_bytes(pages[index]) for index in which], unasked_bytes)
            frames = [
                _set_frame(names[index], pages[index], (*options, b"NX") if at < num_unasked else options)
                for at, index in enumerate(which)
            ]

            def wanted(at: int, answer: bytes) -> bool:
                length = _length(answer)
                return length is not None and not fits(length, pages[which[at]], self._ragged)

            answers, replies = stream.ask_and_set(questions, frames, num_unasked, wanted)
            is_stored = self._refusals.is_stored
            stored = {at: is_stored(reply) for at, reply in replies.items() if reply != NIL}
            return [(_number(answer), stored.get(at)) for at, answer in enumerate(answers)]

        return self._each_node(
            names, ask, lambda: self._fallback.set_missing(names, pages, options, unasked_bytes)
        )

    def remove(self, names: Sequence[bytes]) -> None:
        """UNLINK each."""
        self._numbers(names, [(b"UNLINK", name) for name in names])

    def _each_node(
        self,
        names: Sequence[bytes],
        ask: Callable[[RespStream, Sequence[int]], list[T]],
        otherwise: Callable[[], list[T]],
    ) -> list[T]:
        """Answers in the order of `names`; a cluster that moves its slots is left to redis-py."""
        answers: dict[int, T] = {}
        if self._is_outdated:
            self._client.nodes_manager.initialize()
            self._is_outdated = False
        try:
            for pool, which in self._by_pool(names):
                answers.update(zip(which, self._on_socket(pool, ask, which)))
        except ReplyError as error:
            if not self._is_cluster or error.code not in _MOVED:
                raise
            return otherwise()
        except (OSError, *CLIENT_FAULTS):
            self._is_outdated = self._is_cluster
            raise
        return [answers[index] for index in range(len(names))]

    def _by_pool(self, names: Sequence[bytes]) -> list[tuple[Any, list[int]]]:
        if not self._is_cluster:
            return [(self._client.connection_pool, list(range(len(names))))] if names else []
        by_node: dict[str, tuple[Any, list[int]]] = {}
        for index, name in enumerate(names):
            node = self._client.get_node_from_key(name)
            pool = self._client.get_redis_connection(node).connection_pool
            by_node.setdefault(node.name, (pool, []))[1].append(index)
        return list(by_node.values())

    def _on_socket(
        self, pool: Any, ask: Callable[[RespStream, Sequence[int]], list[T]], which: Sequence[int]
    ) -> list[T]:
        connection = pool.get_connection()
        codes: Collection[bytes] = ()
        intact = False
        try:
            stream = RespStream(socket_of(connection))
            codes = stream.error_codes
            try:
                answers = ask(stream, which)
            except ReplyError:
                intact = stream.is_drained
                raise
            intact = stream.is_drained
            return answers
        finally:
            if not intact:
                connection.disconnect()
            pool.release(connection)
            if b"READONLY" in codes:
                _leave(self._client)


class ClientCommands:
    """The same through redis-py: for connections whose socket cannot be had, at the price of two copies."""

    def __init__(self, client: Any, ragged: bool = False, refusals: Refusals | None = None):
        self._client = client
        self._ragged = ragged
        self._refusals = refusals or Refusals()

    def lengths(self, names: Sequence[bytes]) -> list[int]:
        return self.numbers([(b"STRLEN", name) for name in names])

    def renew(self, names: Sequence[bytes], ttl_ms: int) -> list[bool]:
        return [number == 1 for number in self.numbers([_renew_command(name, ttl_ms) for name in names])]

    def numbers(self, commands: Sequence[Sequence[bytes]]) -> list[int]:
        """The values of integer replies."""
        return [_number(reply) for reply in self._run(commands)]

    def get(self, names: Sequence[bytes], pages: Sequence[Page], ttl_ms: int) -> list[bool]:
        replies = self._run([_get_command(name, ttl_ms) for name in names])
        return [_copied(reply, page, self._ragged) for reply, page in zip(replies, pages)]

    def set(self, names: Sequence[bytes], pages: Sequence[Page], options: Sequence[bytes]) -> list[bool]:
        commands = [(b"SET", name, b"".join(page), *options) for name, page in zip(names, pages)]
        return list(map(self._refusals.is_stored, self._run(commands)))

    def set_missing(
        self, names: Sequence[bytes], pages: Sequence[Page], options: Sequence[bytes], unasked_bytes: int
    ) -> list[Found]:
        lengths = self.lengths(names)
        missing = [i for i, page in enumerate(pages) if not fits(lengths[i], page, self._ragged)]
        stored = self.set([names[i] for i in missing], [pages[i] for i in missing], options)
        sent = dict(zip(missing, stored, strict=True))
        return [(length, sent.get(index)) for index, length in enumerate(lengths)]

    def remove(self, names: Sequence[bytes]) -> None:
        self.numbers([(b"UNLINK", name) for name in names])

    def _run(self, commands: Sequence[Sequence[bytes]]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(command[0].decode("ascii"), *command[1:])  # its name must be text
        replies: list[Any] = pipeline.execute(raise_on_error=False)
        if any(isinstance(reply, redis.exceptions.ReadOnlyError) for reply in replies):
            _leave(self._client)
        return replies


Commands = SocketCommands | ClientCommands


def socket_of(connection: Any) -> Any:
    """The connected socket of a redis-py connection. Raises StorageError where this redis-py hides it."""
    sock = getattr(connection, "_sock", None)
    if sock is None or not hasattr(sock, "recv_into"):
        raise StorageError('this redis-py gives no access to its sockets; set "zero_copy": false')
    return sock


def _get_command(name: bytes, ttl_ms: int) -> tuple[bytes, ...]:
    return (b"GETEX", name, b"PX", b"%d" % ttl_ms) if ttl_ms else (b"GET", name)


def _renew_command(name: bytes, ttl_ms: int) -> tuple[bytes, ...]:
    return (b"PEXPIRE", name, b"%d" % ttl_ms)


def _set_frame(name: bytes, page: Page, options: Sequence[bytes]) -> Frame:
    head, tail = encode_around((b"SET", name), page_bytes(page), options)
    return head, page, tail


def _leading(sizes: Sequence[int], limit_bytes: int) -> int:
    """The number of leading payloads that begin within so many bytes."""
    return sum(end - size < limit_bytes for size, end in zip(sizes, accumulate(sizes)))


def _number(reply: Any) -> int:
    """The number in an integer reply; 0 for a value that is no string. Other errors are raised."""
    if isinstance(reply, int):
        return reply
    number = _length(reply)
    if number is None:
        raise ReplyError(_error_text(reply))
    return number


def _length(reply: Any) -> int | None:
    """The same; None where `_number` would raise."""
    if isinstance(reply, bytes) and reply[:1] == b":":
        return number_in(reply)
    return 0 if _error_text(reply).startswith("WRONGTYPE") else None


def _leave(client: Any) -> None:
    """Close what connections are idle, so that the next call connects to who is master by then."""
    if not isinstance(client, redis.RedisCluster):
        client.connection_pool.disconnect(inuse_connections=False)


def _copied(reply: Any, page: Page, ragged: bool) -> bool:
    if isinstance(reply, Exception) and not _error_text(reply).startswith("WRONGTYPE"):
        raise ReplyError(_error_text(reply))
    if not isinstance(reply, bytes) or not fits(len(reply), page, ragged):
        return False
    if isinstance(page, InPlacePage):
        page.begin(len(reply))
        return page.write(memoryview(reply))
    fill_head(memoryview(reply), page)
    return True


def _error_text(reply: Any) -> str:
    if isinstance(reply, bytes) and reply[:1] == b"-":
        return reply[1:].decode("utf-8", "replace")
    if isinstance(reply, redis.exceptions.OutOfMemoryError):
        return f"OOM {reply}"
    if isinstance(reply, redis.exceptions.ReadOnlyError):
        return f"READONLY {reply}"
    if isinstance(reply, redis.ConnectionError | redis.TimeoutError):
        raise reply
    return str(reply)
