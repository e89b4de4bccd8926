"""Ghosts: hashed prefixes of what has left the cache, with the note of its last use. Bounded.

A prefix is named in blocks of about 512 tokens by a chain of 8-byte hashes, so that what was evicted costs
a table entry and no tokens. The hash is keyed anew in each process: names never leave it (`names`). A wrong
match (once in 2^64) costs a wrong statistic, never a wrong hit.
"""

from __future__ import annotations

from collections import OrderedDict
from struct import Struct
from typing import Final, Generic, TypeVar

from hiradix.policy.names import name_of
from hiradix.tree import RadixKey
from hiradix.tree.native import mypyc_attr

BLOCK_TOKENS: Final = 512
NAME_BYTES: Final = 8
_SHORT: Final = 512  # bytes of names that are copied rather than shared
_packed: Final = Struct("<q").pack

NoteT = TypeVar("NoteT")


@mypyc_attr(acyclic=True)
class BlockNames:
    """Names of a path's blocks. Immutable; those of one conversation share their bytes.

    The pieces but the last grow at least twofold towards the front, so there are O(log blocks) of them.
    """

    __slots__ = ("_pieces", "num_blocks")

    def __init__(self, pieces: tuple[bytes, ...], num_blocks: int):
        self._pieces = pieces
        self.num_blocks = num_blocks

    def head(self, num_blocks: int) -> BlockNames:
        """The first `num_blocks` of it."""
        if num_blocks >= self.num_blocks:
            return self
        left, kept = num_blocks * NAME_BYTES, []
        for piece in self._pieces:
            if left <= 0:
                break
            kept.append(piece[:left])
            left -= len(piece)
        return BlockNames(tuple(kept), num_blocks)

    def joined(self, names: bytes) -> BlockNames:
        if not names:
            return self
        pieces, num_blocks = self._pieces, self.num_blocks + len(names) // NAME_BYTES
        while pieces and len(pieces[-1]) < max(2 * len(names), _SHORT):
            pieces, names = pieces[:-1], pieces[-1] + names
        return BlockNames((*pieces, names), num_blocks)

    def names(self, first: int, last: int) -> list[bytes]:
        """Names of blocks [first, last), as far as it reaches."""
        found: list[bytes] = []
        at = 0
        for piece in self._pieces if first < last else ():
            count = len(piece) // NAME_BYTES
            for block in range(max(first - at, 0), min(last - at, count)):
                found.append(piece[block * NAME_BYTES : (block + 1) * NAME_BYTES])
            at += count
        return found

    @property
    def last(self) -> bytes:
        """The name of its last block, b"" if it has none."""
        return self._pieces[-1][-NAME_BYTES:] if self._pieces else b""


EMPTY: Final = BlockNames((), 0)


def extend(
    blocks: BlockNames, key: RadixKey, num_blocks: int, page_size: int, pages_per_block: int
) -> BlockNames:
    """The names of the first blocks of `key`, extended to `num_blocks`. About 0.3 us per block of 512."""
    known = blocks.num_blocks
    if known >= num_blocks:
        return blocks
    size, lookahead = page_size * pages_per_block, key.space.lookahead
    name = blocks.last or key.space.seed
    names: list[bytes] = []
    at, end = known * size, num_blocks * size
    while at < end:
        if key.extras is not None:
            page = at // page_size
            name = _packed(hash((name, key.extras_of(page, page + pages_per_block))))
        run, first, last = key.span(at, at + size + lookahead)
        name = name_of(name, run, first, last)
        names.append(name)
        at += size
    return blocks.joined(names[0] if len(names) == 1 else b"".join(names))


class Ghosts(Generic[NoteT]):
    """Notes by block name; when full, what left first is forgotten first. O(1): a dict's first would be searched
    for behind all that were taken out since it grew."""

    def __init__(self, limit: int):
        self.limit = limit
        self._notes: OrderedDict[bytes, NoteT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._notes)

    def add(self, name: bytes, note: NoteT) -> NoteT | None:
        """Remember; returns the note that had to go for it."""
        self._notes.pop(name, None)
        self._notes[name] = note
        if len(self._notes) > self.limit:
            return self._notes.popitem(last=False)[1]
        return None

    def pop(self, name: bytes) -> NoteT | None:
        """The note of a block that is back; it is a ghost no more."""
        return self._notes.pop(name, None)

    def clear(self) -> None:
        self._notes.clear()
