"""Token runs of nodes: stored narrow, compared as arrays."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from hiradix.tree.key import RadixKey
from hiradix.tree.node import Node

_INT32 = np.iinfo(np.int32)


def own_tokens(tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy of `tokens`, int32 if all fit."""
    narrow = tokens.astype(np.int32)
    return narrow if (narrow == tokens).all() else tokens.astype(np.int64)


def matched_pages(child: Node, key: RadixKey, num_pages: int, page_size: int) -> int:
    """Pages of `child` that `key`, whose whole pages number `num_pages`, continues with.

    The first page is equal: the child was found by it. One vectorised comparison; a mixed one of int32
    and int64 widens, so tokens that do not fit 32 bits never compare equal to some that do.
    """
    limit = min(child.end, num_pages) - child.start
    if limit == 1:
        return 1
    lookahead = child.space.lookahead
    at, count = child.start * page_size, limit * page_size + lookahead
    own = child.tokens if count == len(child.tokens) else child.tokens[:count]
    mismatch = int((own != key.tokens[at : at + count]).argmax())  # 0: none, as the first token is equal
    matched = (mismatch - lookahead) // page_size if mismatch else limit
    if child.extras is not None or key.extras is not None:
        return _matched_extras(child, key, matched)
    return matched


def _matched_extras(child: Node, key: RadixKey, limit: int) -> int:
    for page in range(1, limit):
        own = child.extras[page] if child.extras is not None else None
        if own != key.extra(child.start + page):
            return page
    return limit


def row_at(node: Node, page: int, page_size: int) -> Hashable:
    """What `RadixKey.row` gives for page `page` of `node`, counted from its start."""
    assert node.start + page > 0, "the first row of all names its namespace, which only a key knows"
    at = page * page_size
    row: Hashable
    if page_size == 1 and not node.space.is_bigram:
        row = node.tokens.item(at)
    else:
        row = node.tokens[at : at + page_size + node.space.lookahead].astype(np.int64).tobytes()
    extra = node.extras[page] if node.extras is not None else None
    return row if extra is None else (row, extra)


def split_run(node: Node, upper: Node, page_size: int) -> None:
    """Hand the run of `node` up to `upper.end` to `upper`; both get arrays of their own."""
    at, cut = upper.end - upper.start, (upper.end - upper.start) * page_size
    upper.row, node.row = node.row, row_at(node, at, page_size)
    tokens = node.tokens
    upper.tokens = tokens[: cut + node.space.lookahead].copy()
    node.tokens = tokens[cut:].copy()
    if node.extras is not None:
        upper.extras, node.extras = _some(node.extras[:at]), _some(node.extras[at:])
    upper.digests, node.digests = node.digests[: at * 32], node.digests[at * 32 :]
    node.start = upper.end


def _some(extras: tuple[bytes | None, ...]) -> tuple[bytes | None, ...] | None:
    return extras if any(extras) else None
