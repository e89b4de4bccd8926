"""Lossy compression: pages of 16 or 32 bit floats as fp8 codes, 32 of which share a power of two.

A stored page is its codes (float8 e4m3, one byte each), then one exponent byte per 32 values (e8m0: 127
stands for 1), the last of them for what is left. So 64 or 128 bytes become 33. Where the backend checks
nothing itself, a seal follows.

Error: a value comes back within 1/16 of itself, or within 1/200,000 of the largest finite value of its 32; for
float16, within 2^-24 if that is more. NaN stays NaN, and infinities become the largest code of their
block. Coded pages have a fingerprint of their own, so that they are never read as exact ones.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hiradix.errors import ConfigError, Misuse
from hiradix.storage.fingerprint import PageFingerprint
from hiradix.storage.kit.call_threads import scatter
from hiradix.storage.kit.meters import MissReason
from hiradix.storage.kit.options import flag
from hiradix.storage.kit.seal import REASONS, SEAL_BYTES, Sealer, Verdict
from hiradix.storage.protocol import Page, StorageBackend, page_bytes
from hiradix.storage.wrappers.wrapper import CodingWrapper

if TYPE_CHECKING:
    import torch

KEY = "quantise"
CODEC = "fp8-e4m3-32"
BLOCK = 32
ELEMENTS = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes of each
_LARGEST = 448.0
_NAN = 0xFF  # either sign
_PIECE = 1 << 17  # values coded at once
_SMALLEST_NORMAL = 1.1754943508222875e-38


def element_bytes(elements: str) -> int:
    """Bytes of one value of this type. Raises ConfigError for pages that cannot be quantised."""
    if elements not in ELEMENTS:
        these = f"of {elements}" if elements else "recurrent states, of several types, or unknown"
        raise ConfigError(f"{flag(KEY)}: for pages of {', '.join(ELEMENTS)} alone; these are {these}")
    return ELEMENTS[elements]


def coded_bytes(num_bytes: int, elements: str) -> int:
    """Length of a coded page of so many bytes of that type, without a seal. Raises ConfigError."""
    num, rest = divmod(num_bytes, element_bytes(elements))
    if rest:
        raise ConfigError(f"{flag(KEY)}: pages of {num_bytes} bytes are not of {elements} alone")
    return num + -(-num // BLOCK)


class _Scratch:
    """A thread's memory for one piece, as fresh temporaries for each page would cost page faults."""

    def __init__(self) -> None:
        import torch

        with torch.inference_mode(False):  # what is made in that mode cannot be written to outside
            self.values = torch.empty(_PIECE, dtype=torch.float32)
            self.sizes = torch.empty(_PIECE, dtype=torch.float32)
            self.halves = torch.empty(_PIECE, dtype=torch.int16)
            self.codes = torch.empty(_PIECE, dtype=torch.uint8)


_local = threading.local()


def _scratch_of_thread() -> _Scratch:
    """The calling thread's scratch memory."""
    own: _Scratch | None = getattr(_local, "scratch", None)
    if own is None:
        own = _local.scratch = _Scratch()
    return own


def _pieces(num: int) -> Iterator[tuple[slice, slice]]:
    """The places, for each piece of `num` values, of its codes and of its exponents."""
    for start in range(0, num, _PIECE):
        end = min(start + _PIECE, num)
        yield slice(start, end), slice(num + start // BLOCK, num - (-end // BLOCK))


def encode(page: Page, elements: str) -> bytearray:
    """Codes and exponents of a page whose buffers, in order, are values of that type."""
    import torch

    values = torch.frombuffer(bytearray().join(page), dtype=getattr(torch, elements))
    num = len(values)
    coded = bytearray(num + -(-num // BLOCK))
    data = torch.frombuffer(coded, dtype=torch.uint8)
    for piece, blocks in _pieces(num):
        _encode(values[piece], data[piece], data[blocks])
    return coded


def _encode(values: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor) -> None:
    """Fill `codes` and `exponents` of a piece."""
    import torch

    num, scratch = len(values), _scratch_of_thread()
    whole = len(exponents) * BLOCK
    padded, sizes = scratch.values[:whole], scratch.sizes[:whole].view(-1, BLOCK)
    padded[:num].copy_(values)
    padded[num:] = 0
    rows = padded.view(-1, BLOCK)
    largest = torch.abs(rows, out=sizes).amax(dim=1)
    is_finite = bool(largest.isfinite().all())  # or some value is none; asking each of them doubles the time
    if not is_finite:
        largest = torch.where(torch.isfinite(rows), sizes, 0.0).amax(dim=1)
    bits = (largest * (1.0 / _LARGEST)).view(torch.int32)
    scales = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32).clamp_min_(_SMALLEST_NORMAL)
    rows /= scales[:, None]
    if not is_finite:
        rows.clamp_(-_LARGEST, _LARGEST)
    codes.view(torch.float8_e4m3fn).copy_(padded[:num])
    exponents.copy_(scales.view(torch.int32) >> 23)


def decode(coded: memoryview, elements: str, num_bytes: int) -> memoryview:
    """The page of so many bytes, in one buffer."""
    import torch

    dtype, num = getattr(torch, elements), num_bytes // element_bytes(elements)
    data, page = torch.frombuffer(coded, dtype=torch.uint8), torch.empty(num, dtype=dtype)
    limit = torch.finfo(dtype).max  # a code may round up past it
    for piece, blocks in _pieces(num):
        values = _decoded(data[piece])
        scales = (data[blocks].to(torch.int32) << 23).view(torch.float32)
        inner = len(values) // BLOCK * BLOCK
        values[:inner].view(-1, BLOCK).mul_(scales[: inner // BLOCK, None])
        values[inner:] *= scales[-1]
        page[piece].copy_(values.clamp_(-limit, limit))
    found: memoryview = page.view(torch.uint8).numpy().data
    return found


def _decoded(codes: torch.Tensor) -> torch.Tensor:
    """Codes as float32, without the scales, in the thread's scratch.

    By way of float16, whose bits they are but for a factor of 256: torch converts float8 one by one, which
    takes 20 times as long.
    """
    import torch

    num, scratch = len(codes), _scratch_of_thread()
    values = scratch.values[:num]
    if int(torch.bitwise_or(codes, 0x80, out=scratch.codes[:num]).max()) == _NAN:
        return values.copy_(codes.view(torch.float8_e4m3fn))
    halves = scratch.halves[:num].copy_(codes.view(torch.int8))
    halves <<= 7
    halves &= ~0x4000  # the sign came here too
    return values.copy_(halves.view(torch.float16)).mul_(256.0)


def rounded(page: bytes, elements: str) -> memoryview:
    """The page as it comes back from storage."""
    return decode(memoryview(encode([memoryview(page)], elements)), elements, len(page))


class QuantisedStorage(CodingWrapper):
    """Codes pages on their way into a backend, and decodes them on the way out. Thread-safe.

    elements: the one type that pages are made of.

    fingerprint: of coded pages, with the codec in it.
    """

    def __init__(self, inner: StorageBackend, fingerprint: PageFingerprint, elements: str):
        super().__init__(inner)
        if fingerprint.codec != CODEC:
            raise Misuse(f"pages under the names of exact ones: {fingerprint}")
        self._sealer = None if self.traits.verifies else Sealer(fingerprint.digest())
        self.traits = dataclasses.replace(self.traits, verifies=True)
        self._elements = elements

    def own_stats(self) -> Mapping[str, float]:
        return {"quantise_damaged": self._num_damaged}

    def _most_bytes(self, num_bytes: int) -> int:
        return coded_bytes(num_bytes, self._elements) + (0 if self._sealer is None else SEAL_BYTES)

    def _pack(self, key: str, page: Page) -> bytearray:
        data = encode(page, self._elements)
        if self._sealer is not None:
            data += self._sealer.seal(key, [memoryview(data)])
        return data

    def _unpack(self, key: str, stored: memoryview, page: Page) -> MissReason | None:
        if self._sealer is not None:
            stored, seal = stored[:-SEAL_BYTES], stored[-SEAL_BYTES:]
            verdict = self._sealer.check(seal, key, [stored])
            if verdict is not Verdict.GOOD:
                return REASONS[verdict]
        scatter(decode(stored, self._elements, page_bytes(page)), page)
        return None
