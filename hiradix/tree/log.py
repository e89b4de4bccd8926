"""The tokens of a growing conversation: looking them up again costs only what is new.

The keys of a log share a bookmark, the node in which the tree found the last of them. Only the log writes its
buffer, and it only appends, so the path to that node is still a prefix and the next walk starts there. The tree
checks that the node is still its own; otherwise the walk starts at the root.
"""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np

from hiradix.tree.key import Bookmark, RadixKey, Tokens, as_tokens, namespace, num_of


class TokenLog:
    """Append-only tokens int64 in a namespace. Its keys are read-only views.

    It refers to the node found last, so it keeps that node's tokens alive. Fast in one tree at a time, correct
    in several.

    >>> log = TokenLog([1, 2, 3])
    >>> log.extend([4, 5])
    >>> len(log), log.key(4).tokens.tolist()
    (5, [1, 2, 3, 4])
    """

    __slots__ = ("_buffer", "_length", "_space", "_bookmark")

    def __init__(
        self,
        token_ids: Any = (),
        extra_key: Any = None,
        is_bigram: bool = False,
        *,
        cache_salt: Any = None,
    ):
        self._buffer: Tokens = np.empty(0, np.int64)
        self._length = 0
        self._space = namespace(extra_key, cache_salt, is_bigram)
        self._bookmark = Bookmark()
        self.extend(token_ids)

    def __len__(self) -> int:
        return self._length

    def extend(self, token_ids: Any) -> None:
        """Append tokens. Copies them; amortised O(new)."""
        new = as_tokens(token_ids) if len(token_ids) else self._buffer[:0]
        end = self._length + len(new)
        if end > len(self._buffer):
            grown = np.empty(max(2 * len(self._buffer), end), np.int64)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : end] = new
        self._length = end

    def key(self, num_tokens: SupportsIndex | None = None) -> RadixKey:
        """The key of the first `num_tokens` tokens, or of all. O(1). ValueError for fewer than none."""
        count = self._length if num_tokens is None else min(num_of(num_tokens), self._length)
        tokens = self._buffer[:count]
        tokens.flags.writeable = False
        key = RadixKey.first(tokens, count, self._space)
        key.bookmark = self._bookmark
        return key
