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
