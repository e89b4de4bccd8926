"""Page hashes of nodes: rows for a worker to hash, and the digests it brings back.

A chain always goes on from a known digest or from the root's seed, never from the middle: where a node's
prior is unknown, the rows reach back until one is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hiradix.errors import Misuse
from hiradix.tree.hashing import DIGEST_BYTES, PageRows
from hiradix.tree.key import Extras, Namespace, RadixKey
from hiradix.tree.node import Node


def _known_prior(node: Node, start: int) -> tuple[int, bytes]:
    """The last page s <= start on `node`'s path whose prior digest is known, and it (b"": the seed)."""
    at = node
    while at.parent is not None:
        known = min(at.start + len(at.digests) // DIGEST_BYTES, start)
        if known > at.start:
            end = (known - at.start) * DIGEST_BYTES
            return known, at.digests[end - DIGEST_BYTES : end]
        at = at.parent
    return 0, b""


def _path_tokens(node: Node, start: int, page_size: int) -> npt.NDArray[np.int64]:
    """Tokens of the path from page `start` to the end of `node`, lookahead included."""
    parts = []
    at, lookahead = node, node.space.lookahead
    while at.parent is not None and at.end > start:
        skipped = max(start - at.start, 0) * page_size
        parts.append(at.tokens[skipped : len(at.tokens) - (lookahead if at is not node else 0)])
        at = at.parent
    parts.reverse()
    return np.concatenate([np.empty(0, np.int64), *parts])


def _path_extras(node: Node, start: int) -> Extras | None:
    """Extras of the path's pages [start, node.end), None if there are none."""
    parts: list[bytes | None] = []
    at = node
    while at.parent is not None and at.end > start:
        own = at.extras or (None,) * at.num_pages
        parts[:0] = own[max(start - at.start, 0) :]
        at = at.parent
    return tuple(parts) if any(parts) else None


def _shape(
    tokens: npt.NDArray[np.int64], num_pages: int, page_size: int, space: Namespace
) -> npt.NDArray[np.int64]:
    """Copied rows [P, S + lookahead] of a run of tokens."""
    width = page_size + space.lookahead
    if num_pages == 0:
        return np.empty((0, width), np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, width)
    return np.array(windows[::page_size][:num_pages])


def page_rows(node: Node, start: int, page_size: int) -> PageRows:
    """See `RadixTree.page_rows`."""
    first, prior = _known_prior(node, start)
    rows = _shape(_path_tokens(node, first, page_size), node.end - first, page_size, node.space)
    space, extras = node.space, _path_extras(node, first)
    whose = space.tenant, space.extra_key
    return PageRows(prior or space.seed, rows, extras, space.is_bigram, first, *whose)


def key_rows(key: RadixKey, node: Node, span: tuple[int, int], page_size: int) -> PageRows:
    """See `RadixTree.rows`; span: pages [start, end)."""
    start, end = span
    if not (start <= node.end or node.parent is None):
        raise Misuse(f"pages from {start} on, known up to {node.end}")
    first, prior = _known_prior(node, start)
    return rows_behind(key, prior or key.space.seed, (first, end), page_size)


def rows_behind(key: RadixKey, prior: bytes, span: tuple[int, int], page_size: int) -> PageRows:
    """See `RadixTree.rows_behind`; span: pages [start, end)."""
    start, end = span
    tokens = key.tokens[start * page_size : end * page_size + key.space.lookahead]
    rows = _shape(tokens, end - start, page_size, key.space)
    space = key.space
    return PageRows(
        prior, rows, key.extras_of(start, end), key.is_bigram, start, space.tenant, space.extra_key
    )


def set_hashes(node: Node, start: int, digests: Sequence[bytes]) -> None:
    """See `RadixTree.set_hashes`."""
    if start + len(digests) != node.end:
        raise Misuse(f"{len(digests)} hashes from page {start} to {node.end}")
    at = node
    while at.parent is not None and at.end > start:
        known = len(at.digests) // DIGEST_BYTES
        if at.start + known >= start:  # else a gap would be left
            given = digests[at.start + known - start : at.end - start]
            at.digests += b"".join(given)
        at = at.parent


def hashes(node: Node) -> list[bytes] | None:
    """See `RadixTree.hashes`."""
    if len(node.digests) < node.num_pages * DIGEST_BYTES:
        return None
    return [node.digests[i : i + DIGEST_BYTES] for i in range(0, len(node.digests), DIGEST_BYTES)]


def path_key(node: Node, page_size: int) -> RadixKey:
    """See `RadixTree.path_key`."""
    space = node.space
    return RadixKey(
        _path_tokens(node, 0, page_size),
        space.extra_key,
        space.is_bigram,
        cache_salt=space.cache_salt,
        page_extras=_path_extras(node, 0),
    )
