"""JSON of clients: its length alone bounds no cost, so its values are counted before it is parsed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

MAX_VALUES = 1 << 20
"""More tokens than any prompt has."""
MAX_NESTED = 1 << 17
"""Lists and objects, each of which is a hundred bytes and work for the garbage collector."""


def parse(data: bytes) -> Any:
    """The value of a JSON text. ValueError or RecursionError if it is no JSON or has too many values.

    Holds the interpreter lock for up to half a second with 32 MiB.
    """
    num_nested, num_more = data.count(b"[") + data.count(b"{"), data.count(b",")
    if num_nested > MAX_NESTED or num_nested + num_more > MAX_VALUES:
        num_nested, num_more = _outside_of_texts(data)
        if num_nested > MAX_NESTED or num_nested + num_more > MAX_VALUES:
            raise ValueError(f"more than {MAX_NESTED} lists and objects, or {MAX_VALUES} values")
    return json.loads(data.decode("utf-8-sig"))


def _outside_of_texts(data: bytes) -> tuple[int, int]:
    """How many lists and objects begin, and how many commas there are, outside of quotes."""
    plain = np.frombuffer(data.replace(b"\\\\", b"  ").replace(b'\\"', b"  "), np.uint8)
    outside = ~np.logical_xor.accumulate(plain == ord('"'))
    nested = (plain == ord("[")) | (plain == ord("{"))
    return int(np.count_nonzero(nested & outside)), int(np.count_nonzero((plain == ord(",")) & outside))
