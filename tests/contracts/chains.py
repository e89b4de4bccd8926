"""What every store with a cap of its own does with chains, and with names that are none.

    class TestMine(ChainContract):
        def open(self, place, fingerprint=FINGERPRINT, **config): return MyBackend(...)
        def bounded(self, make, pages): return make(max_size=...)
        def used_pages(self, place): ...

A page's name depends on all pages before it, so a real page has one page in front of it, ever. A store that
is given other names, as a client of its own making may, stores or refuses each: it never raises, never holds
more than its cap, and never gives up what a put has just stored.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hiradix.storage import Batch
from tests.contracts.storage import Base, Make, hits, hits_without_using, key_of, keys_of, put
from tests.seeds import seeded, seeds

ROOM = 6


def chain_key(path: Sequence[int]) -> str:
    """The key of the page at the end of `path`: a function of all of it, as the names of pages are."""
    return hashlib.sha256(repr(tuple(path)).encode()).hexdigest()


def chain_keys(path: Sequence[int]) -> list[str]:
    """The keys of a chain's pages, its head first."""
    return [chain_key(path[: end + 1]) for end in range(len(path))]


Call = Callable[[Any, Batch], list[bool]]


def in_chain(call: Call, store: Any, keys: Sequence[str], front: str = "") -> list[bool]:
    """`call` on a part of a chain. front: the page in front of it, if that is told."""
    return call(store, Batch.of(keys, after=front))


def in_pieces(call: Call, store: Any, keys: Sequence[str], size: int) -> list[bool]:
    """The same in several calls, as a job makes them, and a guard of a long one."""
    whole, answers = Batch.of(keys), list[bool]()
    for start in range(0, len(keys), size):
        answers += call(store, whole[start : start + size])
    return answers


class ChainContract(Base):
    """A cap, and chains that leave from their ends."""

    def bounded(self, make: Make, pages: int) -> Any:
        """A store with room for exactly `pages` pages of PAGE_BYTES."""
        raise NotImplementedError

    def used_pages(self, place: Path) -> int:
        """How many pages the store at `place` holds."""
        raise NotImplementedError

    @pytest.mark.parametrize(("again", "told"), [(1, False), (1, True), (0, True)])
    def test_a_chain_longer_than_its_room_keeps_its_head(self, make: Make, again: int, told: bool) -> None:
        """Its next turn comes, with the last page once more or behind it: no page of it leaves for another
        that cannot be found without that."""
        store, keys = self.bounded(make, ROOM), chain_keys(range(7))
        assert in_chain(put, store, keys[:4]) == [True] * 4
        start = 4 - again
        answer = in_chain(put, store, keys[start:], keys[start - 1] if told else "")
        assert answer == [True] * (6 - start) + [False]
        assert hits_without_using(store, keys) == [True] * 6 + [False]

    def test_another_chain_leaves_first_and_from_its_end(self, make: Make) -> None:
        store, ours, theirs = self.bounded(make, ROOM), chain_keys([0] * 5), chain_keys([1] * 4)
        assert all(in_chain(put, store, ours[:2])) and all(in_chain(put, store, theirs))
        assert in_chain(put, store, ours[1:], ours[0]) == [True] * 4
        assert hits_without_using(store, ours) == [True] * 5
        assert hits_without_using(store, theirs) == [True] + [False] * 3

    def test_where_chains_part_each_keeps_what_they_share(self, make: Make) -> None:
        store = self.bounded(make, ROOM)
        one, two = chain_keys([0, 0, 1, 1, 1]), chain_keys([0, 0, 2, 2, 2])
        assert all(in_chain(put, store, one))
        assert in_chain(put, store, two[2:], two[1]) == [True] * 3
        assert hits_without_using(store, two) == [True] * 5
        assert hits_without_using(store, one) == [True] * 3 + [False] * 2

    # -- names that do not chain ------------------------------------------------------------

    def test_a_page_behind_two_fronts_is_held_to_the_one_known_first(self, make: Make) -> None:
        """`x` is in front of `d` now, as `c` was before: no two prefixes have a page in common, so this is no
        chain's page. What was known before counts."""
        store = self.bounded(make, ROOM)
        a, b, c, d, e, f, g, x = keys_of(8)
        assert all(in_chain(put, store, [a, b, c, d]))
        assert all(in_chain(put, store, [x, d]))
        assert in_chain(put, store, [d, e, f, g])[:1] == [True]
        assert hits_without_using(store, [a, b, c, d]) == [True] * 4

    def test_rings_and_pages_in_front_of_themselves_leave_too(self, make: Make, tmp_path: Path) -> None:
        store = self.bounded(make, ROOM)
        a, b, c = keys_of(3)
        for keys in ([a, b, c], [c, b, a], [b, c, a]):
            assert in_chain(put, store, keys, keys[-1]) == [True] * 3
        assert in_chain(put, store, [a], a) == [True]
        for number in range(10, 16):
            assert in_chain(put, store, [key_of(number)]) == [True]
        assert hits_without_using(store, [a, b, c]) == [False] * 3
        assert self.used_pages(tmp_path) == ROOM

    @seeded
    @pytest.mark.parametrize("seed", seeds(4))
    def test_names_in_no_order_are_stored_or_refused(self, make: Make, tmp_path: Path, seed: int) -> None:
        """Any names behind any others, whole or in pieces, put and read: what a put says is so."""
        store, rng = self.bounded(make, ROOM), random.Random(seed)
        names = keys_of(12)
        for _ in range(60):
            keys = rng.sample(names, rng.randint(1, 9))
            before = hits_without_using(store, keys)
            if rng.random() < 0.25:
                in_chain(hits, store, keys, rng.choice(["", *names]))
                continue
            if self.raises and rng.random() < 0.3:  # a guard cuts by itself
                answer = in_pieces(put, store, keys, rng.randint(1, 4))
            else:
                answer = in_chain(put, store, keys, rng.choice(["", *names]))
                kept = all(answer[at] for at, there in enumerate(before) if there)
                assert kept or not self.raises, "it left for its own call"
            assert len(answer) == len(keys)
            assert answer == hits_without_using(store, keys), "what was stored, or was there, is there"
            assert self.used_pages(tmp_path) <= ROOM
