"""Events as the wire has them, before they are encoded, and what decides how blocks are named."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from hiradix.tree import Namespace
from hiradix.tree.hashing import tagged_seed

_SALT_TAG = b"sglang-cache-salt-v1\0"
_NAMESPACE_TAG = b"sglang-kv-event-namespace-v1"

Token = int | tuple[int, int]  # a pair, where rows are bigrams


class Medium(IntEnum):
    """The place of a block. The first two are the tree's tiers, under the same numbers."""

    DEVICE = 0
    HOST = 1
    DISK = 2  # of this machine
    EXTERNAL = 3


_LOCAL_STORAGE = ("disk", "file")  # backends of this machine


def storage_medium(name: str | None) -> Medium:
    """The medium of what is stored in the backend of this name."""
    return Medium.DISK if name in _LOCAL_STORAGE else Medium.EXTERNAL


WIRE_NAMES = ("GPU", "CPU_PINNED", "DISK", "EXTERNAL")  # by medium


@dataclass(slots=True)
class BlockStored:
    """Consecutive blocks are in `medium`. token_ids: `block_size` for each of them; parent: the block before.

    cache_salt, lora_name: of the namespace, where it has them.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[Token]
    block_size: int
    medium: str
    cache_salt: str | None = None
    lora_name: str | None = None
    lora_id: int | None = None


@dataclass(slots=True)
class BlockRemoved:
    """Blocks have left `medium`."""

    block_hashes: list[int]
    medium: str


@dataclass(slots=True)
class AllBlocksCleared:
    """No block is anywhere any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def _no_name(extra_key: str | None) -> str | None:
    return None


@dataclass(frozen=True)
class Naming:
    """The rule by which blocks are named.

    is_dynamo: a block's name depends on adapter and tenant; else on the tenant's salt only, and on the
        adapter's key where `lora_name` knows it. With adapters that it does not know, two blocks may then
        have one name.
    lora_name: the public name of the adapter an extra_key belongs to, if any. Any thread.
    """

    is_dynamo: bool = False
    lora_name: Callable[[str | None], str | None] = _no_name

    def prior(self, space: Namespace) -> bytes:
        """The seed of a namespace's chain of hashes."""
        if space.cache_salt is None:
            return b""
        return hashlib.sha256(_SALT_TAG + space.cache_salt.encode()).digest()

    def seed(self, space: Namespace) -> bytes:
        """The salt with which names are hashed once more; b"" for none."""
        if self.is_dynamo:
            return tagged_seed(_NAMESPACE_TAG, space.extra_key, space.cache_salt)
        if space.extra_key is None or self.lora_name(space.extra_key) is None:
            return b""
        return tagged_seed(_NAMESPACE_TAG, space.extra_key, None)
