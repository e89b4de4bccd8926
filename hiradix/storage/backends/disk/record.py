"""Records of the log: 96 bytes, little endian, each bound to its log and its place in it.

magic "HR", kind u8, checksum algorithm u8, segment u32, version u64, namespace 16 bytes, key 32 bytes, slot
u32, length u32, checksum of the page u64, time of use in ns i64, flags u32, crc32 u32. The crc is seeded with
the log's number and the record's position, so a record that was copied or moved is as damaged as a torn one.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

from hiradix.errors import Misuse
from hiradix.storage.protocol import PAGE_HASH_CHARS, check_key

_FORMAT = struct.Struct("<2sBBIQ16s32sIIQqI")
_CRC = struct.Struct("<I")
_WHOLE = struct.Struct("<2sBBIQ16s32sIIQqII")
_BODY_BYTES, _MASK = _FORMAT.size, 0xFFFFFFFF
RECORD_BYTES = _FORMAT.size + _CRC.size
if RECORD_BYTES != 96:
    raise Misuse("the record on the medium has another length")
_MAGIC = b"HR"
FORMAT_VERSION = 1
NO_KEY, NO_NAMESPACE = bytes(32), bytes(16)
_HASHED = 1  # flag: `key` is the hash of a key that is no page hash
BEHIND_NEXT = 2  # flag of a PUT: in front of this page in its chain is that of the next PUT
_HEX = frozenset("0123456789abcdef")


class Kind(IntEnum):
    """The kind of a record."""

    HEADER = 1  # first of a log. version: the log's number, segment: next segment's, checksum: next version
    SEGMENT = 2  # a new segment file. slot: how many slots, length: bytes of each
    DROP = 3  # a segment file goes, with all its pages
    FREE = 4  # a slot has no page from here on; comes before the slot is written
    PUT = 5  # a slot has this page; comes after it was written
    TOUCH = 6  # a slot's page was used
    CLEAR = 7  # all pages of a namespace go
    MOVED = 8  # last of a log: another one is about to take its place
    FOLLOWS = 9  # a slot's page has one in front of it in its chain. key, flags: that one's
    RETIRED = 10  # the disk cannot read or write a slot: no page comes there. Comes after a FREE of it


class Record(NamedTuple):
    """One record; fields that its kind does not use are zero."""

    kind: int
    segment: int = 0
    slot: int = 0
    version: int = 0
    namespace: bytes = NO_NAMESPACE
    key: bytes = NO_KEY
    num_bytes: int = 0
    algorithm: int = 0
    checksum: int = 0
    used_ns: int = 0
    flags: int = 0


Name = str | bytes
"""The name of a key in the index: a page hash as it is, other keys by their SHA-256."""


def name_of(key: str) -> Name:
    """The name of a key; raises StorageError for what is no key."""
    if len(check_key(key)) == PAGE_HASH_CHARS and _HEX.issuperset(key):
        return key
    return hashlib.sha256(key.encode("ascii")).digest()


def packed_name(name: Name) -> tuple[bytes, int]:
    """A name as a record's key and flags."""
    return (bytes.fromhex(name), 0) if isinstance(name, str) else (name, _HASHED)


def unpacked_name(key: bytes, flags: int) -> Name:
    """The reverse of `packed_name`."""
    return key if flags & _HASHED else key.hex()


def pack(records: Iterable[Record], log_number: int, position: int) -> bytes:
    """Records as the log has them, the first at `position` (counted in records)."""
    done = []
    for place, r in enumerate(records, position):
        body = _FORMAT.pack(
            _MAGIC, r.kind, r.algorithm, r.segment, r.version, r.namespace, r.key,
            r.slot, r.num_bytes, r.checksum, r.used_ns, r.flags,
        )  # fmt: skip
        done.append(body + _CRC.pack(crc32(body, _seed(log_number, place))))
    return b"".join(done)


def unpack(raw: bytes, log_number: int, position: int) -> Iterator[Record | None]:
    """The whole records in `raw`, which begins at `position`; None for a damaged one."""
    num_records, seed = len(raw) // RECORD_BYTES, log_number + position
    whole = memoryview(raw)[: num_records * RECORD_BYTES]
    starts = range(0, len(whole), RECORD_BYTES)
    for index, start, fields in zip(range(num_records), starts, _WHOLE.iter_unpack(whole)):
        mark, kind, method, segment, version, space, key, slot, length, total, used_ns, flags, crc = fields
        if crc != crc32(whole[start : start + _BODY_BYTES], (seed + index) & _MASK) or mark != _MAGIC:
            yield None
        else:
            yield Record(kind, segment, slot, version, space, key, length, method, total, used_ns, flags)


def header_of(raw: bytes) -> tuple[int, int] | None:
    """Number and format of the log that begins with `raw`; None unless that is a whole header."""
    if len(raw) < RECORD_BYTES:
        return None
    number = int(_FORMAT.unpack_from(raw)[4])
    (first,) = unpack(raw[:RECORD_BYTES], number, 0)
    return (number, first.num_bytes) if first is not None and first.kind == Kind.HEADER else None


def _seed(log_number: int, position: int) -> int:
    return (log_number + position) & _MASK
