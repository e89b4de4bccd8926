"""The seal: 64 bytes beside a page that say whose it is and what its bytes were.

Little endian: magic "HRXP", version u16, checksum algorithm u8, zero u8, payload length u64, first 16 bytes
of the fingerprint, 16 bytes of the key's hash, payload checksum u64, zero u32, crc32 u32 of the 60 bytes
before. The page hash in the key names the content, so a page under another's key is as wrong as a flipped
bit.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

from hiradix.errors import Misuse
from hiradix.storage.kit.meters import MissReason
from hiradix.storage.protocol import Page, page_bytes

_FORMAT = struct.Struct("<4sHBBQ16s16sQI")
_CRC = struct.Struct("<I")
SEAL_BYTES = _FORMAT.size + _CRC.size
_MAGIC, VERSION = b"HRXP", 1
if SEAL_BYTES != 64:
    raise Misuse("the record on the medium has another length")

XXH3_64, CRC32, NONE = 1, 2, 0
RUNNING: dict[int, Callable[[], Running]] = {}
"""By algorithm number: what makes a checksum that has seen nothing yet."""


class Running(Protocol):
    """The border to checksum libraries: a checksum of bytes that come piece by piece."""

    def update(self, data: memoryview, /) -> Any:
        """Add the next bytes."""

    def intdigest(self) -> int:
        """The checksum of all that came."""


class _RunningCrc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def intdigest(self) -> int:
        return self._value


def _xxh3_64() -> Callable[[Page], int] | None:
    try:
        import xxhash
    except ImportError:
        return None
    RUNNING[XXH3_64] = xxhash.xxh3_64

    def checksum(page: Page) -> int:
        if len(page) == 1:
            value: int = xxhash.xxh3_64_intdigest(page[0])
            return value
        state: Any = xxhash.xxh3_64()
        for view in page:
            state.update(view)
        return int(state.intdigest())

    return checksum


def _crc32(page: Page) -> int:
    value = 0
    for view in page:
        value = zlib.crc32(view, value)
    return value


RUNNING[CRC32] = _RunningCrc32
_fast = _xxh3_64()
CHECKSUMS: dict[int, Callable[[Page], int]] = {CRC32: _crc32} | (
    {XXH3_64: _fast} if _fast is not None else {}
)
"""By algorithm number. xxh3_64 runs at memory speed and needs the package xxhash; crc32 is always there."""
DEFAULT_ALGORITHM = XXH3_64 if _fast is not None else CRC32


class Verdict(Enum):
    """The verdict of a seal on a page."""

    GOOD = "good"
    DAMAGED = "damaged"  # these bytes are not what was stored
    FOREIGN = "foreign"  # intact, but for another key, fingerprint, length or format, or without a checksum
    UNKNOWN = "unknown"  # intact seal, but its checksum cannot be computed here


REASONS = {
    Verdict.DAMAGED: MissReason.DAMAGED,
    Verdict.FOREIGN: MissReason.FOREIGN,
    Verdict.UNKNOWN: MissReason.FOREIGN,
}


def key_digest(key: str) -> bytes:
    """16 bytes that stand for a key."""
    return hashlib.blake2b(key.encode("ascii"), digest_size=16).digest()


class Sealer:
    """Writes and checks seals for one fingerprint. Stateless, so usable from any thread.

    algorithm: what new seals carry; `NONE` leaves the payload unchecked (identity and length still are).
    verify: whether `check` computes the payload's checksum.
    """

    def __init__(self, fingerprint: str, algorithm: int = DEFAULT_ALGORITHM, verify: bool = True):
        if not (algorithm == NONE or algorithm in CHECKSUMS):
            raise Misuse(f"no checksum algorithm {algorithm}")
        self._fingerprint = bytes.fromhex(fingerprint)[:16]
        self._algorithm = algorithm
        self._verify = verify

    def seal(self, key: str, page: Page) -> bytes:
        """The 64 bytes for `page` under `key`. One pass over the page."""
        checksum = CHECKSUMS[self._algorithm](page) if self._algorithm != NONE else 0
        head = _FORMAT.pack(
            _MAGIC,
            VERSION,
            self._algorithm,
            0,
            page_bytes(page),
            self._fingerprint,
            key_digest(key),
            checksum,
            0,
        )
        return head + _CRC.pack(zlib.crc32(head))

    def check(
        self,
        seal: bytes | bytearray | memoryview,
        key: str,
        page: Page,
        known: tuple[int, int] | None = None,
    ) -> Verdict:
        """Whether `page` is what was sealed under `key`; only GOOD may be used.

        known: an algorithm, and the page's checksum by it.
        """
        if len(seal) != SEAL_BYTES or _CRC.unpack_from(seal, _FORMAT.size)[0] != zlib.crc32(
            seal[: _FORMAT.size]
        ):
            return Verdict.DAMAGED
        magic, version, algorithm, zero, length, fingerprint, name, checksum, zeros = _FORMAT.unpack_from(
            seal
        )
        if magic != _MAGIC or zero or zeros:
            return Verdict.DAMAGED
        mine = (VERSION, page_bytes(page), self._fingerprint, key_digest(key))
        if (version, length, fingerprint, name) != mine:
            return Verdict.FOREIGN
        if not self._verify:
            return Verdict.GOOD
        if algorithm == NONE:  # of a process that writes none: whether these are its bytes nobody can tell
            return Verdict.FOREIGN
        if algorithm not in CHECKSUMS:
            return Verdict.UNKNOWN
        found = known[1] if known is not None and known[0] == algorithm else CHECKSUMS[algorithm](page)
        return Verdict.GOOD if found == checksum else Verdict.DAMAGED
