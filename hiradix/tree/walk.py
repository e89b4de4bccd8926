"""The walk along a key: the one descent that match and insert share.

Runs are packed bytes, so a page is looked up and compared without making an array; only a long run is compared
as arrays, in place.
"""

from __future__ import annotations

from typing import Final

from hiradix.tree import ids
from hiradix.tree.key import NARROW, PLAIN, RadixKey
from hiradix.tree.node import Node

LONG_BYTES: Final = 32768  # from here on comparing arrays in place is faster than slicing the key's bytes


def walk(node: Node, key: RadixKey, num_pages: int, page_size: int) -> tuple[Node, Node | None, int]:
    """Follow `key`, which has `num_pages` whole pages, down from `node`, which lies on it.

    Returns (the deepest node that lies on it as a whole; its child that lies on it in part, or None; how many
    pages of that child do).
    """
    lookahead = key.space.lookahead
    row_tokens = page_size + lookahead
    row_bytes = row_tokens * NARROW
    named = key.extras is not None or (node.end == 0 and key.space is not PLAIN)  # rows are more than tokens
    while (end := node.end) < num_pages:
        at = end * page_size
        if at < key.run_start or at + row_tokens > key.run_end:
            key.load(at, row_tokens)
        first = (at - key.run_start) * NARROW
        if named or key.run_width != NARROW:
            child = node.children.get(key.row(end, page_size))
            named = key.extras is not None
        else:
            child = node.children.get(key.run[first : first + row_bytes])
        if child is None:
            break
        run = child.run
        size = len(run)
        if (
            child.end > num_pages
            or size > LONG_BYTES
            or key.run[first : first + size] != run
            or child.width != NARROW
            or key.run_width != NARROW
            or child.extras is not None
            or named
        ):
            matched = _matched_pages(child, key, num_pages, page_size)
            if matched < child.end - end:
                return node, child, matched
        node = child
    return node, None, 0


def _matched_pages(child: Node, key: RadixKey, num_pages: int, page_size: int) -> int:
    """The number of leading pages that `child` and `key` have in common; at least one, as the child was found
    by its first row. A token of more than 32 bits equals none of fewer."""
    limit = min(child.end, num_pages) - child.start
    if limit > 1:
        lookahead = child.space.lookahead
        at, count = child.start * page_size, limit * page_size + lookahead
        equal = ids.num_equal(child.run, child.width, key.tokens, at, at + count)
        if equal < count:
            limit = (equal - lookahead) // page_size
    if child.extras is not None or key.extras is not None:
        return _matched_extras(child, key, limit)
    return limit


def _matched_extras(child: Node, key: RadixKey, limit: int) -> int:
    for page in range(1, limit):
        own = child.extras[page] if child.extras is not None else None
        if own != key.extra(child.start + page):
            return page
    return limit
