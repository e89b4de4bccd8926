"""Lossless compression with zstd, for backends that store values of any length.

A stored page is `HRZ1` (compressed) or `HRZ0` (as it was, where it does not shrink), the length of what
follows (u32, little endian), and that.
"""

from __future__ import annotations

import dataclasses
import struct
import threading
from collections.abc import Mapping, Sequence

import zstandard

from hiradix.storage.lanes import scatter
from hiradix.storage.protocol import Page, StorageBackend, page_bytes
from hiradix.storage.wrapper import Wrapper

_HEAD = struct.Struct("<4sI")
_PLAIN, _PACKED = b"HRZ0", b"HRZ1"
OVERHEAD_BYTES = _HEAD.size


class CompressedStorage(Wrapper):
    """Pages are compressed on their way in. Needs a backend whose context was `ragged`. Thread-safe."""

    def __init__(self, inner: StorageBackend, level: int):
        super().__init__(inner)
        self.traits = dataclasses.replace(self.traits, lands=False)
        self._level = level
        self._local = threading.local()
        self._lock = threading.Lock()
        self._bytes_in = self._bytes_out = self._num_damaged = 0

    def get(
        self, keys: Sequence[str], into: Sequence[Page], prefix_keys: Sequence[str] | None = None
    ) -> list[bool]:
        stored = [memoryview(bytearray(page_bytes(page) + OVERHEAD_BYTES)) for page in into]
        ok = self._get(keys, [[view] for view in stored], prefix_keys)
        whole = [good and self._unpack(view, page) for good, view, page in zip(ok, stored, into, strict=True)]
        self._spoilt.note(key for key, good, fine in zip(keys, ok, whole) if good and not fine)
        return whole

    def put(
        self,
        keys: Sequence[str],
        pages: Sequence[Page],
        prefix_keys: Sequence[str] | None = None,
        tenant: str = "",
    ) -> list[bool]:
        packed = [self._pack(page) for page in pages]
        with self._lock:
            self._bytes_in += sum(page_bytes(page) for page in pages)
            self._bytes_out += sum(len(data) for data in packed)
        return self._put(keys, [[memoryview(data)] for data in packed], prefix_keys, tenant)

    def own_stats(self) -> Mapping[str, float]:
        with self._lock:
            return {
                "compress_bytes_in": self._bytes_in,
                "compress_bytes_out": self._bytes_out,
                "compress_damaged": self._num_damaged,
            }

    def _pack(self, page: Page) -> bytes:
        plain = b"".join(page)
        packed = self._compressor().compress(plain)
        if len(packed) >= len(plain):
            return _HEAD.pack(_PLAIN, len(plain)) + plain
        return _HEAD.pack(_PACKED, len(packed)) + bytes(packed)

    def _unpack(self, stored: memoryview, page: Page) -> bool:
        """Whether `stored` was a frame that makes exactly this page; the page is filled then."""
        magic, length = _HEAD.unpack_from(stored)
        body = stored[_HEAD.size : _HEAD.size + length]
        try:
            if magic == _PACKED and zstandard.frame_content_size(body) == page_bytes(page):
                body = memoryview(self._decompressor().decompress(body))  # as long as it says, if at all
            elif magic != _PLAIN:
                body = memoryview(b"")
        except zstandard.ZstdError:
            body = memoryview(b"")
        if body.nbytes != page_bytes(page):
            with self._lock:
                self._num_damaged += 1
            return False
        scatter(body, page)
        return True

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
