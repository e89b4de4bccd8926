"""Readers of an event stream, and what a tree says they must have understood.

`Router` keeps media apart, as Dynamo does; `Viewer` forgets a removed block whatever the medium, as radixview
does. `residency` walks the tree and names its pages from SGLang's formula, written out here once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from hiradix.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from hiradix.tree import RadixKey, RadixTree, Tier

MEDIA = ("GPU", "CPU_PINNED")


class Router:
    """Which blocks are in which medium."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.media: dict[str, set[int]] = {}
        self.known: dict[int, tuple[int | None, tuple]] = {}  # block -> (parent, its tokens)

    def read(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    assert name in self.media.get(event.medium, ()), f"{name} was never in {event.medium}"
                self.media[event.medium] -= set(event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.media.clear()

    def _stored(self, event: BlockStored) -> None:
        size, names = event.block_size, event.block_hashes
        assert size == self.page_size and len(event.token_ids) == size * len(names) and names
        assert len(set(names)) == len(names), "a block twice in one event"
        parent = event.parent_block_hash
        for i, name in enumerate(names):
            block = parent, tuple(event.token_ids[i * size : (i + 1) * size])
            assert self.known.setdefault(name, block) == block, "one name for two blocks"
            parent = name
        self.media.setdefault(event.medium, set()).update(names)

    def check(self, tree: RadixTree, is_dynamo: bool) -> None:
        """What it understood of device and host is the tree's residency, and no block hangs in the air."""
        wanted = residency(tree, is_dynamo)
        for medium in MEDIA:
            assert self.media.get(medium, set()) == wanted[medium], f"{medium} differs"
        everywhere = wanted["GPU"] | wanted["CPU_PINNED"]
        for name in everywhere:
            parent = self.known[name][0]
            assert parent is None or parent in everywhere, f"{name} is there, its parent is not"


class Viewer:
    """A block is somewhere, or nowhere: the last word counts."""

    def __init__(self) -> None:
        self.medium_of: dict[int, str] = {}

    def read(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self.medium_of.update(dict.fromkeys(event.block_hashes, event.medium))
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    self.medium_of.pop(name, None)
            else:
                self.medium_of.clear()

    def check(self, tree: RadixTree, is_dynamo: bool) -> None:
        """It shows what is on device or host, and where one of the two is right."""
        wanted = residency(tree, is_dynamo)
        assert set(self.medium_of) == wanted["GPU"] | wanted["CPU_PINNED"]
        for name, medium in self.medium_of.items():
            assert name in wanted[medium], f"{name} is shown in {medium}, where it is not"


def residency(tree: RadixTree, is_dynamo: bool) -> dict[str, set[int]]:
    """The names of the pages in each tier."""
    found: dict[str, set[int]] = {medium: set() for medium in MEDIA}
    for node in tree.nodes():
        names = key_names(tree.path_key(node), tree.page_size, is_dynamo)[node.start :]
        assert len(names) == node.num_pages
        for tier, medium in zip((Tier.DEVICE, Tier.HOST), MEDIA, strict=True):
            if node.resident(tier):
                assert not found[medium] & set(names), "two pages of a tier have one name"
                found[medium].update(names)
    return found


def key_names(key: RadixKey, size: int, is_dynamo: bool) -> list[int]:
    """Names of a key's pages."""
    salt = key.cache_salt
    digest = b"" if salt is None else hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest()
    seed = namespace_seed(key.extra_key, salt) if is_dynamo else b""
    tokens = [int(token) for token in key.tokens]
    names = []
    for page in range(len(key) // size):
        row = tokens[page * size : (page + 1) * size]
        if key.is_bigram:
            row = [t for i in range(size) for t in tokens[page * size + i : page * size + i + 2]]
        digest = page_hash(digest, row, key.extra(page))
        names.append(short(digest if not seed else hashlib.sha256(seed + digest[:8]).digest()))
    return names


def page_hash(prior: bytes, tokens: list[int], extra: bytes | None = None) -> bytes:
    if max(tokens) < 1 << 32:
        data = prior + b"".join(token.to_bytes(4, "little") for token in tokens)
    else:
        data = prior + b"\xff" + b"".join(token.to_bytes(8, "little") for token in tokens)
    digest = hashlib.sha256(data).digest()
    if extra is None:
        return digest
    return hashlib.sha256(
        b"hiradix-page-extra-v1" + len(extra).to_bytes(8, "little") + extra + digest
    ).digest()


def namespace_seed(*parts: str | None) -> bytes:
    if parts == (None, None):
        return b""
    data = b"sglang-kv-event-namespace-v1"
    for part in parts:
        text = b"" if part is None else part.encode()
        data += b"\0" if part is None else b"\1" + len(text).to_bytes(8, "little") + text
    return hashlib.sha256(data).digest()


def short(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)
