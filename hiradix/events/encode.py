"""Events as msgpack: tagged maps, as SGLang sends since 0.5.10, or tagged arrays, as before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hiradix.events.wire_events import BlockRemoved, BlockStored, Event

Encode = Callable[[float, Sequence[Event], int | None], bytes]
"""A batch's time in seconds since the epoch, its events and the data-parallel rank, as a payload."""


def encoder(encoding: str) -> Encode:
    """`map` or `array`. One thread."""
    shaped, packer = _SHAPES[encoding], msgspec.msgpack.Encoder()

    def encode(time_s: float, events: Sequence[Event], rank: int | None) -> bytes:
        payload: bytes = packer.encode([time_s, [shaped(event) for event in events], rank])
        return payload

    return encode


def as_map(event: Event) -> dict[str, Any]:
    """Fields by name; what may be absent and is, is left out."""
    if isinstance(event, BlockStored):
        shown: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": event.block_hashes,
            "parent_block_hash": event.parent_block_hash,
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "lora_id": event.lora_id,
            "medium": event.medium,
        }
        for name in ("cache_salt", "lora_name"):
            if (value := getattr(event, name)) is not None:
                shown[name] = value
        return shown
    if isinstance(event, BlockRemoved):
        return {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": event.medium}
    return {"type": "AllBlocksCleared"}


def as_array(event: Event) -> list[Any]:
    """Fields by place; no salt and no adapter's name."""
    if isinstance(event, BlockStored):
        return [
            "BlockStored", event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size,
            event.lora_id, event.medium,
        ]  # fmt: skip
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", event.block_hashes, event.medium]
    return ["AllBlocksCleared"]


_SHAPES: dict[str, Callable[[Event], object]] = {"map": as_map, "array": as_array}
