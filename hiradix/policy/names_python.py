"""Names of blocks by Python's own hash of bytes; `names` says what they are."""

from __future__ import annotations

from struct import Struct
from typing import Final

from hiradix.errors import Misuse

_pack: Final = Struct("<q").pack


def name_of(prior: bytes, run: bytes, first: int, last: int) -> bytes:
    if not 0 <= first <= last <= len(run):
        raise Misuse(f"bytes {first}..{last} of {len(run)}")
    return _pack(hash((prior, run[first:last])))


def names_of(prior: bytes, run: bytes, count: int, step: int, size: int) -> bytes:
    if count < 0 or step < 1 or size < step or (count and (count - 1) * step + size > len(run)):
        raise Misuse(f"{count} rows of {size} bytes, {step} apart, of {len(run)}")
    names = []
    for first in range(0, count * step, step):
        prior = name_of(prior, run, first, first + size)
        names.append(prior)
    return b"".join(names)
