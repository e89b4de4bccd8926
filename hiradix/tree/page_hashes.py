"""Page hashes of nodes: rows for a worker to hash, and the digests it brings back.

A chain continues from a known digest or from the namespace's seed, never from the middle: where a node's prior
is unknown, the rows reach back until one is known.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hiradix.tree.hashing import DIGEST_BYTES
from hiradix.tree.key import Extras, Namespace
from hiradix.tree.node import Node


def known_prior(node: Node, start: int) -> tuple[int, bytes]:
    """(s, digest of the page before s): the last page s up to `start` on the path of `node` for which it is
    known; (0, b"") if none is."""
    at = node
    while at.parent is not None:
        known = min(at.start + len(at.digests) // DIGEST_BYTES, start)
        if known > at.start:
            end = (known - at.start) * DIGEST_BYTES
            return known, at.digests[end - DIGEST_BYTES : end]
        at = at.parent
    return 0, b""


def path_tokens(node: Node, start: int, page_size: int) -> npt.NDArray[np.int64]:
    """Tokens of the path from page `start` to the end of `node`, lookahead included."""
    parts = []
    at, lookahead = node, node.space.lookahead
    while at.parent is not None and at.end > start:
        skipped = max(start - at.start, 0) * page_size
        parts.append(at.tokens[skipped : len(at.tokens) - (lookahead if at is not node else 0)])
        at = at.parent
    parts.reverse()
    return np.concatenate([np.empty(0, np.int64), *parts])


def path_extras(node: Node, start: int) -> Extras | None:
    """Extras of the path's pages [start, node.end), None if there are none."""
    parts: list[bytes | None] = []
    at = node
    while at.parent is not None and at.end > start:
        own = at.extras or (None,) * at.num_pages
        parts[:0] = own[max(start - at.start, 0) :]
        at = at.parent
    return tuple(parts) if any(parts) else None


def windows(
    tokens: npt.NDArray[np.int64], num_pages: int, page_size: int, space: Namespace
) -> npt.NDArray[np.int64]:
    """Copied rows [P, S + lookahead] of a run of tokens."""
    width = page_size + space.lookahead
    if num_pages == 0:
        return np.empty((0, width), np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, width)
    return np.array(windows[::page_size][:num_pages])
