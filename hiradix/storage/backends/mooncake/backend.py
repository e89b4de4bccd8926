"""The `mooncake` backend: pages in the memory that the members of a Mooncake store lend it.

An object is `<key_prefix>-<fingerprint>-<page key>` and holds the page's bytes and its seal, because a member
may leave, or the master hand memory to somebody else, while a page is on its way. Host pools that were
registered are read and written by the library itself. Room and eviction are the master's.

The library gives a transfer up after a minute, but goes on writing what still comes: into pages that belong
to somebody else by then. So a read that failed late is answered only after the library was shut down. The
store is then joined anew beside the calls, which fail meanwhile; memory that this process lends is lost.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from hiradix.errors import CacheError, ConfigError, StorageError, Unreachable
from hiradix.storage.backends.mooncake.config import MooncakeConfig
from hiradix.storage.backends.mooncake.own import OwnMemory, copy_out
from hiradix.storage.batch import Batch
from hiradix.storage.guard.calls import FlagsWithReason
from hiradix.storage.kit.meters import MissReason
from hiradix.storage.kit.options import flag
from hiradix.storage.kit.registered import LaidOut, RegisteredMemory, Span
from hiradix.storage.kit.seal import DEFAULT_ALGORITHM, NONE, Sealer, Verdict
from hiradix.storage.kit.states import StoreStates
from hiradix.storage.protocol import Page, StorageBackend, StorageContext, Traits, check_keys

logger = logging.getLogger(__name__)

ABSENT = (-704, -703)
"""The library's answer for an object that is not there, or that somebody is still writing."""
NO_ROOM = -200
BAD_ARGUMENT, TRANSFER_FAILED = -600, -800
"""A buffer shorter than the object; bytes that did not arrive, which a longer buffer is as well."""
OF_VALUES = (-600, -601)
"""The codes of `setup` for impossible arguments; all others are about a master or a network."""
LATE_S = 10.0
"""Reads that fail sooner were ended by the other side, not given up."""
RDMA_DEVICES = Path("/sys/class/infiniband")
"""Where Linux lists RDMA devices. The library would silently do with TCP."""
_RPC_TIMEOUT = "MC_RPC_TIMEOUT_MS"
_LOCAL_BUFFER_BYTES = 16 << 20  # the library's own, for calls that are not used here


class MooncakeBackend(StorageBackend):
    """Stores pages in memory that a Mooncake store's members lend. Raises ConfigError when the master cannot
    be joined. Thread-safe."""

    traits = Traits(verifies=True, namespaced=True, direct=True)

    def __init__(self, context: StorageContext, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.config = config = MooncakeConfig.from_mapping(context.extra_config)
        if not config.zero_copy:
            self.traits = Traits(verifies=True, namespaced=True)
        digest = context.fingerprint.digest()
        self._prefix = f"{config.key_prefix}-{digest[:32]}-"
        self._sealer = Sealer(digest, DEFAULT_ALGORITHM if config.checksum else NONE, config.checksum)
        self._counts: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._num_calls = self._num_shut = 0
        self._closed = self._joining = False
        self._states = StoreStates("mooncake")
        self._how = ReplicateConfig()
        self._how.replica_num = config.replica_num
        self._store: Any = _joined(config)  # None: shut down, and the library must not be called
        self._memory = RegisteredMemory(config.buffer_bytes, self._register)
        self._own = OwnMemory()
        self._learn()

    # -- the protocol -------------------------------------------------------------------

    def exists(self, batch: Batch) -> int:
        with self._call(batch):
            answers = self._store.batch_is_exist(self._names(batch)) if batch else []
        for index, answer in enumerate(answers):
            if answer != 1:
                if answer < 0:
                    raise StorageError(f"mooncake: exists failed with code {answer}")
                return index
        return len(batch)

    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        faults: list[int] = []

        def move(part: LaidOut) -> list[bool]:
            return self._arrived(part, self._read(part), faults)

        started = self._clock()
        try:
            with self._call(batch) as num_shut:
                return self._each(batch, into, move, faults)
        finally:
            if faults and self._clock() - started > LATE_S:
                self._end_late_reads(num_shut)

    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        faults: list[int] = []
        full: list[int] = []

        def move(part: LaidOut) -> list[bool]:
            part.gather()
            part.seal(self._sealer)
            buffers = _split(part.spans)
            codes = self._store.batch_put_from_multi_buffers(self._names(part.keys), *buffers, self._how)
            self._count("put_no_room", codes.count(NO_ROOM))
            full.extend(code for code in codes if code == NO_ROOM)
            faults.extend(code for code in codes if code not in (0, NO_ROOM))
            return [code == 0 for code in codes]

        with self._call(batch):
            ok = self._each(batch, pages, move, faults)
        if not full:
            self._states.leave("full")
            return ok
        self._states.enter("full", "the members have no memory for more: pages are refused")
        return FlagsWithReason(ok, MissReason.FULL)

    def delete(self, keys: Sequence[str]) -> None:
        with self._call(keys):
            self._remove(keys)

    def clear(self) -> None:
        with self._call(()):
            code = self._store.remove_by_regex(f"^{re.escape(self._prefix)}", True)
        if code < 0:
            raise StorageError(f"mooncake: clear failed with code {code}")

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.wait_for(self._is_idle)  # the library crashes when it is closed with calls inside
        self._shut()

    def ping(self) -> None:
        self.exists(Batch.of(["ping"]))

    def stats(self) -> Mapping[str, float]:
        with self._changed:
            return {"lent_bytes": self.config.segment_bytes, **self._counts}

    def register(self, memory: memoryview) -> None:
        with self._call(()):
            self._memory.add(memory)

    # -- inside -------------------------------------------------------------------------

    @contextmanager
    def _call(self, keys: Sequence[str]) -> Iterator[int]:
        """The time of one call into the library: it must not be shut down meanwhile.

        Gives how often it was before. Where it is shut down, StorageError, and the store is joined anew.
        """
        with self._changed:
            if self._closed:
                raise StorageError("storage backend is closed")
            if self._store is None and not self._joining:
                self._start_joining()
            if self._joining:
                raise StorageError("mooncake: the store is being joined anew")
            self._num_calls += 1
        try:
            check_keys(keys)
            yield self._num_shut
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def _is_idle(self) -> bool:
        return not self._num_calls and not self._joining

    def _end_late_reads(self, num_shut: int) -> None:
        """Shut the library down, so that it writes nothing any more, and begin again.

        num_shut: how often it was when the failed call began; nothing is done if it was again meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._num_shut != num_shut or not (self._joining or self._closed))
            if self._num_shut != num_shut:
                return
            self._joining = True
            self._changed.wait_for(lambda: not self._num_calls)
        self._shut()
        with self._changed:
            self._start_joining()

    def _shut(self) -> None:
        """Shut the library down. Not with calls inside."""
        old, self._store = self._store, None
        if old is not None:
            old.close()
        with self._changed:
            self._num_shut += 1
            self._changed.notify_all()

    def _start_joining(self) -> None:
        """Join on a thread of its own, as the library tries for 40 s if the master hangs. Call with the lock
        held."""
        threading.Thread(target=self._join, name="hiradix-mooncake", daemon=True).start()
        self._joining = True

    def _join(self) -> None:
        """Join the master. If it fails, the next call starts it again."""
        try:
            self._store = _joined(self.config)
            self._memory.register_again()
            self._learn()
            self._count("joined_anew")
        except CacheError as error:
            logger.info("mooncake: cannot join the store anew: %s", error)
            self._shut()
        finally:
            with self._changed:
                self._joining = False
                self._changed.notify_all()

    def _learn(self) -> None:
        if self.config.segment_bytes:
            self._own.learn(self._store, f"{self._prefix}own-{secrets.token_hex(8)}")

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]

    def _register(self, address: int, num_bytes: int) -> None:
        code = self._store.register_buffer(address, num_bytes)
        if code:
            raise StorageError(f"mooncake: registering {num_bytes} bytes failed with code {code}")

    def _count(self, name: str, number: int = 1) -> None:
        if number:
            with self._changed:
                self._counts[name] += number

    def _each(
        self,
        keys: Sequence[str],
        pages: Sequence[Page],
        move: Callable[[LaidOut], list[bool]],
        faults: list[int],
    ) -> list[bool]:
        """Answers page by page. `move` adds to `faults`; StorageError where nothing else arrived."""
        ok: list[bool] = []
        try:
            for part in self._memory.lay_out(keys, pages):
                ok += move(part)
                self._count("pages_copied", part.num_copied)
                self._count("pages_in_place", len(part) - part.num_copied)
        finally:
            self._count("transfer_errors", len(faults))
        if faults and not any(ok):
            raise StorageError(f"mooncake: {len(faults)} transfers failed, with code {faults[0]}")
        return ok

    def _read(self, part: LaidOut) -> Iterator[int]:
        """The library's code for each page in turn. Pages of our own memory are copied when it is theirs."""
        names, spans, num_bytes = self._names(part.keys), part.spans, part.num_bytes
        own = self._own.find(self._store, names, num_bytes)
        others = [index for index in range(len(part)) if index not in own]
        codes = iter(())
        if others:
            buffers = _split([spans[index] for index in others])
            codes = iter(self._store.batch_get_into_multi_buffers([names[i] for i in others], *buffers))
        self._count("pages_own", len(own))
        for index, length in enumerate(num_bytes):
            address = own.get(index)
            if address is None:
                yield next(codes)
            else:
                copy_out(address, spans[index])
                yield length

    def _arrived(self, part: LaidOut, codes: Iterable[int], faults: list[int]) -> list[bool]:
        """Flags of the pages that were read and are good; codes of transfers that failed go into `faults`.

        Pages that are damaged, foreign or of another length are removed, so that they can be put again.
        """
        ok, wrong = [False] * len(part), []
        for index, (code, num_bytes) in enumerate(zip(codes, part.num_bytes, strict=True)):
            if code == num_bytes:
                verdict = part.check(index, self._sealer)
                ok[index] = verdict is Verdict.GOOD
                if verdict in (Verdict.DAMAGED, Verdict.FOREIGN):
                    wrong.append(part.keys[index])
                    self._count(f"read_{verdict.value}")
            elif code in (BAD_ARGUMENT, TRANSFER_FAILED) and self._is_other(part.keys[index], num_bytes):
                wrong.append(part.keys[index])
                self._count("read_other_length")
            elif code not in ABSENT:
                faults.append(code)
        if wrong:
            self._remove(wrong)
        return ok

    def _is_other(self, key: str, num_bytes: int) -> bool:
        """Whether the object is there with another length, which a failed transfer does not say."""
        size = self._store.get_size(self._prefix + key)
        return bool(size >= 0 and size != num_bytes)

    def _remove(self, keys: Sequence[str]) -> None:
        """At once, whoever holds a lease: who reads the page meanwhile sees by its seal."""
        codes = self._store.batch_remove(self._names(keys), True) if keys else []
        bad = [code for code in codes if code not in (0, *ABSENT)]
        if bad:
            raise StorageError(f"mooncake: removing {len(bad)} pages failed with code {bad[0]}")


def _split(pages: Sequence[Sequence[Span]]) -> tuple[list[list[int]], list[list[int]]]:
    addresses = [[address for address, _ in spans] for spans in pages]
    return addresses, [[length for _, length in spans] for spans in pages]


def _joined(config: MooncakeConfig) -> Any:
    """A member of the store. Raises ConfigError; Unreachable where master or network do not answer."""
    os.environ.setdefault(_RPC_TIMEOUT, str(int(config.timeout_s * 1000)))
    if config.protocol == "rdma" and not any(RDMA_DEVICES.glob("*")):
        raise ConfigError(f"{flag('protocol')}: rdma, but there is no device in {RDMA_DEVICES}")
    _reach(config.master_server_address, config.timeout_s)
    store = MooncakeDistributedStore()
    code = store.setup(
        config.local_hostname,
        config.metadata_server,
        config.segment_bytes,
        _LOCAL_BUFFER_BYTES,
        config.protocol,
        config.device_name,
        config.master_server_address,
        tenant_id=config.tenant_id,
    )
    if code:
        kind = ConfigError if code in OF_VALUES else Unreachable
        raise kind(
            f"{flag('master_server_address')}: cannot join {config.master_server_address} over "
            f"{config.protocol}: code {code}"
        )
    return store


def _reach(address: str, timeout_s: float) -> None:
    """Raise Unreachable unless somebody listens at host:port: the library would try for 90 s.

    Addresses with a scheme are the library's own business.
    """
    host, _, port = address.rpartition(":")
    if "://" in address:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, ValueError, OverflowError) as error:  # the last two of a port or a name
        kind = Unreachable if isinstance(error, OSError) else ConfigError
        raise kind(f"{flag('master_server_address')}: cannot reach {address}: {error}") from error
