"""Text that is compressed line by line: whoever reads it finds all that was written, wherever it ends."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from hiradix.errors import ConfigError

PACKED = (".gz", ".zst")
_GZIP = 16 + zlib.MAX_WBITS


def zstandard_for(what: str) -> Any:
    """The package zstandard; ConfigError, which names `what`, where it is not installed."""
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"{what}: .zst needs the package zstandard: pip install zstandard") from None
    return zstandard


def packer(what: str, suffix: str) -> Callable[[bytes], bytes]:
    """What turns each piece of a text into what a file with this suffix takes for it. One file's alone."""
    if suffix == ".gz":
        gzip = zlib.compressobj(wbits=_GZIP)
        return lambda piece: gzip.compress(piece) + gzip.flush(zlib.Z_SYNC_FLUSH)
    if suffix == ".zst":
        module = zstandard_for(what)
        zstd = module.ZstdCompressor().compressobj()
        return lambda piece: bytes(zstd.compress(piece) + zstd.flush(module.COMPRESSOBJ_FLUSH_BLOCK))
    return bytes


def unpacked_head(suffix: str, head: bytes) -> bytes:
    """What a file with this suffix holds at first, by its first bytes. ConfigError if it is none."""
    try:
        if suffix == ".gz":
            return zlib.decompressobj(_GZIP).decompress(head, 4096)
        found: bytes = zstandard_for("a recording").ZstdDecompressor().decompressobj().decompress(head)
        return found
    except Exception as error:
        raise ConfigError(f"no {suffix} file: {error}") from error


def read_gzip(data: bytes, most: int) -> tuple[bytes, bool]:
    """Up to `most` bytes of a gzip file of any number of members, and whether it ends as it should.

    zlib.error where it is damaged.
    """
    parts, left, rest = [], most, data
    while rest and left > 0:
        member = zlib.decompressobj(_GZIP)
        parts.append(member.decompress(rest, left))
        left -= len(parts[-1])
        if not member.eof:
            return b"".join(parts), left <= 0
        rest = member.unused_data.lstrip(b"\0")  # padding, as of tapes
    return b"".join(parts), True
