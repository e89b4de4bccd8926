"""Text that is compressed line by line: whoever reads it finds all that was written, wherever it ends."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Packer(NamedTuple):
    """The compressor of one file. pack: the bytes to write for a piece of text; end: the bytes that end a
    whole file."""

    pack: Callable[[bytes], bytes]
    end: Callable[[], bytes]


def packer(what: str, suffix: str) -> Packer:
    """The packer for files with this suffix; ConfigError, which names `what`, if its compressor is not
    installed."""
    if suffix == ".gz":
        gzip = zlib.compressobj(wbits=_GZIP)
        return Packer(lambda piece: gzip.compress(piece) + gzip.flush(zlib.Z_SYNC_FLUSH), gzip.flush)
    if suffix == ".zst":
        module = zstandard_for(what)
        zstd = module.ZstdCompressor().compressobj()
        return Packer(
            lambda piece: bytes(zstd.compress(piece) + zstd.flush(module.COMPRESSOBJ_FLUSH_BLOCK)),
            lambda: bytes(zstd.flush()),
        )
    return Packer(bytes, bytes)


def unpacked_head(suffix: str, head: bytes) -> bytes:
    """The first bytes of a packed file, unpacked. ConfigError if it is not of the kind that its suffix says."""
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
    parts, remaining, rest = [], most, data
    while rest and remaining > 0:
        member = zlib.decompressobj(_GZIP)
        parts.append(member.decompress(rest, remaining))
        remaining -= len(parts[-1])
        if not member.eof:
            return b"".join(parts), remaining <= 0
        rest = member.unused_data.lstrip(b"\0")  # padding, as of tapes
    return b"".join(parts), True
