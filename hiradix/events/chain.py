"""Names of blocks: made once per block, off the scheduler's thread, and kept through splits and merges.

A `Chain` is the run of tokens that a node had when the tree made it. Its pages have absolute numbers, so the
halves of a split share it, and a merged node finds its upper part by going up `parent`.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np

from hiradix.errors import Misuse
from hiradix.events.wire_events import Naming
from hiradix.tree import Node, PageRows, hash_pages
from hiradix.tree.hashing import DIGEST_BYTES, hash_run
from hiradix.tree.key import NARROW, Extras, Namespace, unpacked


class Chain:
    """Pages [start, end) of a path, below `parent`. Made by the scheduler's thread, named by another.

    run, width, extras: the pages' tokens as a node has them, until they are named.
    """

    __slots__ = ("parent", "start", "end", "space", "run", "width", "extras", "digests", "seed")

    def __init__(self, node: Node, parent: Chain | None):
        self.parent = parent
        self.start, self.end = node.start, node.end
        self.space: Namespace = node.space
        self.run, self.width = node.run, node.width
        self.extras: Extras | None = node.extras
        self.digests = b""
        self.seed = b""

    def name(self, naming: Naming, page_size: int) -> None:
        """Hash the pages of this chain and of those above it, as far as that is not done."""
        unnamed = []
        at: Chain | None = self
        while at is not None and not at.digests:
            unnamed.append(at)
            at = at.parent
        for chain in reversed(unnamed):
            above = chain.parent
            if above is None:
                prior, chain.seed = naming.prior(chain.space), naming.seed(chain.space)
            else:
                prior, chain.seed = above.digest(chain.start - 1), above.seed
            chain.digests = b"".join(_digests(chain, prior, page_size))
            chain.run, chain.extras = b"", None

    def digest(self, page: int) -> bytes:
        """The 32-byte hash of a page that this chain, or one above it, has."""
        chain = self
        while chain.start > page:
            if chain.parent is None:
                raise Misuse(f"page {page} is above the first chain")
            chain = chain.parent
        at = (page - chain.start) * DIGEST_BYTES
        return chain.digests[at : at + DIGEST_BYTES]

    def names(self, start: int, end: int) -> list[int]:
        """The names of pages [start, end): signed 64-bit integers."""
        parts: list[list[int]] = []
        chain: Chain | None = self
        while start < end:
            if chain is None:
                raise Misuse(f"pages [{start}, {end}) are above the first chain")
            if chain.start < end:
                first = max(start, chain.start)
                lo, hi = (first - chain.start) * DIGEST_BYTES, (end - chain.start) * DIGEST_BYTES
                parts.append(_short(chain.digests[lo:hi], chain.seed))
                end = first
            chain = chain.parent
        return parts[0] if len(parts) == 1 else [name for part in reversed(parts) for name in part]

    def parent_name(self, start: int) -> int | None:
        """The name of the page before page `start`; None for the first of a path."""
        return self.names(start - 1, start)[0] if start else None


def chain_of(node: Node) -> Chain:
    """The chain that names the last page of `node`; made now, and above it where there is none yet."""
    missing: list[Node] = []
    at: Node | None = node
    while at is not None and at.parent is not None and at.chain is None:
        missing.append(at)
        at = at.parent
    chain: Chain | None = None if at is None or at.parent is None else at.chain
    for below in reversed(missing):
        chain = below.chain = Chain(below, chain)
    if chain is None:
        raise Misuse(f"{node} is not in the tree")
    return chain


def _digests(chain: Chain, prior: bytes, page_size: int) -> list[bytes]:
    space = chain.space
    if chain.width == NARROW and chain.extras is None and not space.is_bigram and sys.byteorder == "little":
        return hash_run(prior, chain.run, page_size)
    tokens = unpacked(chain.run, chain.width).astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, page_size + space.lookahead)
    rows = np.ascontiguousarray(windows[::page_size][: chain.end - chain.start])
    return hash_pages(PageRows(prior, rows, chain.extras, space.is_bigram, chain.start))


def _short(digests: bytes, seed: bytes) -> list[int]:
    """The first 8 bytes of each digest, big-endian and signed; hashed once more with a seed."""
    short: list[int] = np.frombuffer(digests, ">i8")[:: DIGEST_BYTES // 8].tolist()
    return [_seeded(name, seed) for name in short] if seed else short


def _seeded(name: int, seed: bytes) -> int:
    digest = hashlib.sha256(seed + name.to_bytes(8, "big", signed=True)).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
