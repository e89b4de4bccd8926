"""The `redis` backend: pages as strings in Redis, Valkey or anything that speaks RESP.

A key is `<key_prefix>:<fingerprint>:<page key>`, a value is the page's bytes and nothing else. Room is the
server's business: its `maxmemory` and policy, or a time to live. A policy that evicts leaves holes in
prefixes; a lookup ends at the first one.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from hiradix.errors import StorageError
from hiradix.storage.backends.redis.commands import ClientCommands, Commands, Refusals, SocketCommands
from hiradix.storage.backends.redis.config import RedisConfig
from hiradix.storage.backends.redis.link import connect, server_memory
from hiradix.storage.backends.redis.resp import ReplyError
from hiradix.storage.batch import Batch
from hiradix.storage.protocol import Page, StorageBackend, StorageContext, Traits, check_key, fits

logger = logging.getLogger(__name__)
T = TypeVar("T")
_SCAN = 1000
UNASKED_BYTES = 1 << 20
"""Of a put, that many bytes go with the question which pages are there: a server that waits for the answer to
be read is one that stores nothing meanwhile. None where the last put found pages there."""


class RedisBackend(StorageBackend):
    """Stores pages as strings in Redis or Valkey. Raises ConfigError when the server cannot be used.
    Thread-safe."""

    traits = Traits(namespaced=True, ragged=True, in_place=True)

    def __init__(self, context: StorageContext):
        self.config = config = RedisConfig.from_mapping(context.extra_config)
        self._prefix = f"{config.key_prefix}:{context.fingerprint.digest()[:32]}:".encode()
        self._ttl_ms = int(config.ttl_s * 1000)
        self._expiry = (b"PX", b"%d" % self._ttl_ms) if self._ttl_ms else ()
        self._expects_absent = True  # as the last put found them
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        self._ragged = context.ragged
        self._closed = False
        self._client = connect(config)
        self._refusals = Refusals()
        made = SocketCommands if config.zero_copy else ClientCommands
        self._commands: Commands = made(self._client, context.ragged, self._refusals)
        self._max_bytes, policy = server_memory(self._client)
        if not self._max_bytes and not self._ttl_ms:
            logger.warning("the redis server has no maxmemory and ttl_s is 0: pages are never evicted")
        elif policy == "noeviction" and not self._ttl_ms:
            logger.warning("the redis server's policy is noeviction: when it is full, pages are refused")

    # -- the protocol -------------------------------------------------------------------

    def exists(self, batch: Batch) -> int:
        names = self._names(batch)
        lengths = self._ask(lambda: self._commands.lengths(names))
        return next((index for index, length in enumerate(lengths) if not length), len(batch))

    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        names = self._names(batch)
        try:
            return self._ask(lambda: self._commands.get(names, into, self._ttl_ms))
        except ReplyError as error:
            if not (self._ttl_ms and self._refusals.is_one(str(error))):
                raise
        return self._ask(lambda: self._commands.get(names, into, 0))  # to renew is to write

    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        names, unasked = self._names(batch), UNASKED_BYTES if self._expects_absent else 0
        found = self._ask(lambda: self._commands.set_missing(names, pages, self._expiry, unasked))
        there = [fits(length, page, self._ragged) for (length, _), page in zip(found, pages, strict=True)]
        self._expects_absent = not any(there)
        renewed = self._renew(names, there)
        self._count("put_present", sum(renewed))
        ok = [known or bool(stored) for known, (_, stored) in zip(renewed, found)]
        again = [i for i, (_, stored) in enumerate(found) if not ok[i] and (there[i] or stored is None)]
        for index, stored in self._set(names, pages, again):
            ok[index] = stored
        self._count("put_refused", ok.count(False))
        return ok

    def delete(self, keys: Sequence[str]) -> None:
        self._unlink(self._names(keys))

    def clear(self) -> None:
        self._names(())
        found: list[bytes] = []
        for name in self._ask(lambda: list(self._client.scan_iter(self._prefix + b"*", count=_SCAN))):
            found.append(name)
            if len(found) == _SCAN:
                self._unlink(found)
                found = []
        self._unlink(found)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._client.close()

    def ping(self) -> None:
        self._names(())
        self._ask(self._client.ping)

    def stats(self) -> Mapping[str, float]:
        with self._counts_lock:
            return {"server_max_bytes": self._max_bytes, **self._counts}

    # -- inside -------------------------------------------------------------------------

    def _names(self, keys: Sequence[str]) -> list[bytes]:
        if self._closed:
            raise StorageError("storage backend is closed")
        return [self._prefix + check_key(key).encode("ascii") for key in keys]

    def _count(self, name: str, number: int) -> None:
        if number:
            with self._counts_lock:
                self._counts[name] += number

    def _renew(self, names: Sequence[bytes], there: Sequence[bool]) -> list[bool]:
        """Pages that are there live as long as if they were stored, where the server takes writes; which of
        them did not go meanwhile."""
        ok = list(there)
        which = [index for index, is_there in enumerate(ok) if is_there]
        if which and self._ttl_ms:
            mine = [names[index] for index in which]
            try:
                answers = self._ask(lambda: self._commands.renew(mine, self._ttl_ms))
            except ReplyError as error:
                if not self._refusals.is_one(str(error)):
                    raise
                return ok
            for index, renewed in zip(which, answers):
                ok[index] = renewed
        return ok

    def _set(
        self, names: Sequence[bytes], pages: Sequence[Page], which: Sequence[int]
    ) -> list[tuple[int, bool]]:
        """Write the pages at `which`, over whatever of another length or type is there."""
        mine, data = [names[index] for index in which], [pages[index] for index in which]
        stored = self._ask(lambda: self._commands.set(mine, data, self._expiry)) if which else []
        return list(zip(which, stored))

    def _unlink(self, names: Sequence[bytes]) -> None:
        if names:
            self._ask(lambda: self._commands.remove(names))

    def _ask(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except (StorageError, OSError):
            raise
        except Exception as error:  # the client's own, and what it trips over in replies that are none
            raise StorageError(f"redis: {type(error).__name__}: {error}") from error
