"""Lossless compression with zstd, for backends that store values of any length.

A stored page is `HRZ1` (compressed) or `HRZ0` (as it was, where it does not shrink), the length of what
follows (u32, little endian), and that.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping

import zstandard

from hiradix.storage.kit.call_threads import scatter
from hiradix.storage.kit.meters import MissReason
from hiradix.storage.protocol import Page, StorageBackend, page_bytes
from hiradix.storage.wrappers.wrapper import CodingWrapper

_HEAD = struct.Struct("<4sI")
_PLAIN, _PACKED = b"HRZ0", b"HRZ1"
OVERHEAD_BYTES = _HEAD.size


class CompressedStorage(CodingWrapper):
    """Pages are compressed on their way in. Needs a backend whose context was `ragged`. Thread-safe."""

    def __init__(self, inner: StorageBackend, level: int):
        super().__init__(inner)
        self._level = level
        self._local = threading.local()
        self._bytes_in = self._bytes_out = 0

    def own_stats(self) -> Mapping[str, float]:
        with self._lock:
            return {
                "compress_bytes_in": self._bytes_in,
                "compress_bytes_out": self._bytes_out,
                "compress_damaged": self._num_damaged,
            }

    def _most_bytes(self, num_bytes: int) -> int:
        return num_bytes + OVERHEAD_BYTES

    def _pack(self, key: str, page: Page) -> bytes:
        plain = b"".join(page)
        packed = self._compressor().compress(plain)
        magic, body = (_PACKED, bytes(packed)) if len(packed) < len(plain) else (_PLAIN, plain)
        with self._lock:
            self._bytes_in += len(plain)
            self._bytes_out += OVERHEAD_BYTES + len(body)
        return _HEAD.pack(magic, len(body)) + body

    def _unpack(self, key: str, stored: memoryview, page: Page) -> MissReason | None:
        magic, length = _HEAD.unpack_from(stored)
        body = stored[_HEAD.size : _HEAD.size + length]
        try:
            if magic == _PACKED and zstandard.frame_content_size(body) == page_bytes(page):
                body = memoryview(self._decompressor().decompress(body))  # as long as it says, if at all
            elif magic != _PLAIN:
                return MissReason.DAMAGED
        except zstandard.ZstdError:
            return MissReason.DAMAGED
        if body.nbytes != page_bytes(page):
            return MissReason.DAMAGED
        scatter(body, page)
        return None

    def _compressor(self) -> zstandard.ZstdCompressor:
        own: zstandard.ZstdCompressor | None = getattr(self._local, "compressor", None)
        if own is None:
            own = self._local.compressor = zstandard.ZstdCompressor(level=self._level, write_checksum=True)
        return own

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        own: zstandard.ZstdDecompressor | None = getattr(self._local, "decompressor", None)
        if own is None:
            own = self._local.decompressor = zstandard.ZstdDecompressor()
        return own
