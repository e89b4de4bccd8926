"""What leaves a full store leaves chains from their ends, also where a chain came in several turns."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.apps.storage_tools import main
from hiradix.storage import Batch
from hiradix.storage.backends.disk import DiskBackend
from hiradix.storage.backends.disk.chains import Waiting, coldest, link
from hiradix.storage.backends.disk.record import Name
from hiradix.storage.batch import ChainUse
from tests.contracts.storage import OTHER, blank, hits, keys_of, put
from tests.disk.places import cap_of, open_disk

ROOM = 64
MINUTE_NS = 60 * 10**9
Make = Callable[..., DiskBackend]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    opened: list[DiskBackend] = []
    now_ns = [1_700_000_000 * 10**9]

    def clock() -> int:
        now_ns[0] += MINUTE_NS
        return now_ns[0]

    def make(*args: Any, **config: Any) -> DiskBackend:
        opened.append(open_disk(tmp_path, *args, time_ns=clock, max_size=cap_of(ROOM), **config))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


Call = Callable[[Any, Batch], list[bool]]


def turn(call: Call, store: DiskBackend, chain: list[str], part: slice) -> None:
    """A part of a chain, as a job moves it."""
    assert all(call(store, Batch.of(chain[part], after=chain[part.start - 1] if part.start else "")))


def extended(store: DiskBackend, chain: list[str], pages: int, others: int, theirs: Any = None) -> None:
    """A conversation that goes on, and other pages in between, of `theirs` where that is another store."""
    for start in range(0, len(chain), pages):
        turn(put, store, chain, slice(start, start + pages))
        assert all(put(theirs or store, keys_of(others, 5000 + 100 * start)))


def prefix(store: DiskBackend, keys: Sequence[str]) -> int:
    """How many leading pages are there; fails where one behind the first gap is."""
    there = [store.exists([key]) == 1 for key in keys]
    assert there == sorted(there, reverse=True), there
    return there.count(True)


def test_a_conversation_that_is_only_ever_extended_leaves_from_its_end(make: Make) -> None:
    """Its first page was the oldest of all and left first, and nobody found what had come later."""
    store = make()
    extended(store, keys_of(30), pages=3, others=8)
    assert prefix(store, keys_of(30)) == 30
    left = [30]
    for number in range(9):
        put(store, keys_of(8, 90_000 + 100 * number))
        left.append(prefix(store, keys_of(30)))
    assert left == sorted(left, reverse=True) and left[-1] == 0 and len(set(left)) > 3


def test_turns_that_are_not_found_do_not_keep_those_before_them(make: Make) -> None:
    """They leave when these do, not a round later: what others used since stays."""
    store = make()
    extended(store, keys_of(20), pages=5, others=0)
    assert all(put(store, keys_of(40, 5000)))
    assert all(put(store, keys_of(20, 7000)))
    assert prefix(store, keys_of(20)) <= 4 and all(hits(store, keys_of(40, 5000)))


@pytest.mark.parametrize("rewritten", [False, True])
@pytest.mark.parametrize("who", ["the same", "another", "the next"])
def test_every_process_in_the_directory_knows(make: Make, who: str, rewritten: bool) -> None:
    """Those of other ranks evict, too, and so does the one after a restart."""
    ours = make()
    other = make(OTHER) if who == "another" else ours
    extended(ours, keys_of(30), pages=3, others=3)
    if rewritten:
        with ours._store.locked(), ours._store.mutex:
            ours._store._log.rewrite()
    if who == "the next":
        ours.close()
        other = ours = make()
    turn(put, ours, keys_of(33), slice(30, 33))
    for number in range(2):
        assert all(put(other, keys_of(14, 90_000 + 100 * number)))
    assert hits(ours, keys_of(33)) == [True] * 33


def test_what_was_read_by_itself_makes_what_is_in_front_of_it_used(make: Make) -> None:
    store = make()
    turn(put, store, keys_of(20), slice(0, 20))
    store.close()
    store = make()
    turn(hits, store, keys_of(20), slice(0, 20))
    assert all(put(store, keys_of(40, 5000)))
    turn(hits, store, keys_of(20), slice(10, 20))
    assert all(put(store, keys_of(40, 7000)))
    assert prefix(store, keys_of(20)) == 20


def test_no_page_makes_room_for_what_follows_it(make: Make) -> None:
    """A conversation as long as the room: its next turn drove out its first pages, or those before itself."""
    store = make()
    for start in range(0, ROOM, 16):
        turn(put, store, keys_of(ROOM), slice(start, start + 16))
    length = prefix(store, keys_of(ROOM))
    put(store, Batch.of(keys_of(10, ROOM), after=keys_of(ROOM)[-1]))
    assert prefix(store, keys_of(ROOM + 10)) >= length


def test_reads_keep_no_chain_in_memory(make: Make) -> None:
    """A page read at the end of a long chain is noted, not the chain."""
    store = make()
    put(store, keys_of(8))

    class Keys(list[str]):
        """As a list, of which it can be told whether somebody has it."""

    front = Keys(keys_of(9, 100))
    use = ChainUse(keys_of(8), before=front)
    assert store.get(use.part(7, 8), [blank()]) == [True]
    alive = weakref.ref(front)
    del use, front
    gc.collect()
    assert alive() is None


def test_turns_of_a_clock_that_was_ahead_do_not_stay_for_ever(tmp_path: Path) -> None:
    """They waited for their time to come, and each new page left for the next one."""
    now_ns = [1_800_000_000 * 10**9]

    def clock() -> int:
        now_ns[0] += MINUTE_NS
        return now_ns[0]

    store = open_disk(tmp_path, time_ns=clock, max_size=cap_of(ROOM))
    extended(store, keys_of(48), pages=6, others=0)
    assert all(put(store, keys_of(16, 5000)))
    turn(put, store, keys_of(52), slice(48, 52))
    assert all(put(store, keys_of(1, 6000)))
    now_ns[0] -= 30 * 24 * 60 * MINUTE_NS
    assert all(hits(store, keys_of(1, 6000)))
    for number in range(20):
        assert all(put(store, keys_of(4, 7000 + 4 * number)))
    assert all(hits(store, keys_of(40, 7000 + 4 * 10)))
    store.close()


def test_pages_that_a_tool_copies_are_no_chain(make: Make, tmp_path: Path) -> None:
    """They come in the order in which a store lists them: a use of one would be one of all listed before."""
    store = make()
    assert all(put(store, keys_of(20)))
    store.close()
    folder = tmp_path / "store"
    target = f"disk://{folder}2"
    assert main(["copy", f"disk://{folder}", target, "--set-to", f"max_size={cap_of(ROOM)}"]) == 0
    folder.rename(tmp_path / "before")
    Path(f"{folder}2").rename(folder)
    pages = make()._store.shelf.pages
    assert len(pages) == 20 and {page.front for page in pages.values()} == {None}


# -- the order itself -----------------------------------------------------------------------


@dataclass
class Page:
    used_ns: int
    version: int
    front: Name | None = None
    next: Name | None = None


class Pages:
    """A shelf, used as the backend does."""

    def __init__(self) -> None:
        self.pages: OrderedDict[Name, Any] = OrderedDict()
        self.waiting, self.now_ns = Waiting(), 1000

    def use(self, names: Sequence[str], fronts: dict[str, str]) -> None:
        self.now_ns += 1000
        for rank, name in reversed(list(enumerate(names))):
            page = self.pages.setdefault(name, Page(0, self.now_ns + rank))
            page.used_ns = self.now_ns - rank
            self.pages.move_to_end(name)
        for name in names:
            if fronts[name]:
                link(self.pages, self.waiting, name, fronts[name])

    def take(self, count: int, keep: Sequence[str] = (), front: str | None = None) -> list[Name]:
        taken = coldest(self.pages, self.waiting, count, keep, front)
        for name in taken:
            self.waiting.drop(name, self.pages.pop(name))
        return taken

    def behind(self, name: Name) -> list[Name]:
        return [label for label, page in self.pages.items() if page.front == name]


def test_pages_that_have_left_take_no_memory_behind_one_that_all_share() -> None:
    """A system prompt, behind which conversations come and go."""
    shelf = Pages()
    for number in range(1000):
        shelf.use(["shared", str(number)], {"shared": "", str(number): "shared"})
        if number >= 10:
            assert shelf.take(1) == [str(number - 10)]
    assert set(shelf.waiting.parting["shared"]) == {str(number) for number in range(990, 1000)}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_page_leaves_before_what_follows_it(data: st.DataObject) -> None:
    """Conversations that part and go on, some pages of which are used by themselves."""
    shelf, fronts = Pages(), dict[str, str]()
    paths: list[list[str]] = [[]]
    for number in range(data.draw(st.integers(1, 25))):
        path = data.draw(st.sampled_from(paths))
        start = data.draw(st.integers(0, len(path)))
        if data.draw(st.booleans()):
            used = [f"{number} {at}" for at in range(data.draw(st.integers(1, 4)))]
            fronts |= dict(zip(used, [path[start - 1] if start else "", *used]))
            paths.append(path[:start] + used)
        else:
            used = path[start : data.draw(st.integers(start, len(path)))]
        front = fronts[used[0]] if used else None
        if front and front not in shelf.pages:
            continue  # what cannot be found is not gone on with
        for name in reversed(shelf.take(data.draw(st.integers(0, 3)), used, front or None)):
            assert name != front and not shelf.behind(name), f"{name!r} left before what follows it"
        shelf.use(used, fronts)
    order = [name for _ in range(len(shelf.pages)) for name in shelf.take(1)]
    assert not shelf.pages
    places = {name: at for at, name in enumerate(order)}
    assert all(places[name] < places.get(fronts[str(name)], len(order)) for name in order)


def test_what_waits_leaves_when_what_follows_it_would_have() -> None:
    """Not a round later: what was used after both stays."""
    shelf, fronts = Pages(), dict(zip("abcdef", ["", *"abcde"])) | dict.fromkeys("xyz", "")
    shelf.use("abc", fronts)
    shelf.use("x", fronts)
    shelf.use("def", fronts)
    shelf.use("yz", fronts)
    assert shelf.take(1) == ["x"]
    assert shelf.take(4) == ["f", "e", "d", "c"]
    assert shelf.take(4) == ["b", "a", "z", "y"]


def test_what_is_no_chain_and_goes_in_a_ring_leaves_too() -> None:
    shelf = Pages()
    for names in ("abc", "cba", "bca"):
        shelf.use(names, dict(zip(names, [names[-1], *names])))
    assert sorted(map(str, shelf.take(3))) == ["a", "b", "c"]


def test_a_conversation_of_many_turns_is_gone_through_once() -> None:
    shelf, names = Pages(), [str(number) for number in range(3000)]
    fronts = dict(zip(names, ["", *names]))
    for start in range(0, 3000, 10):
        shelf.use(names[start : start + 10], fronts)
    added, add = [0], shelf.waiting.add

    def counted(*args: Any) -> None:
        added[0] += 1
        add(*args)

    shelf.waiting.add = counted  # type: ignore[method-assign]
    assert [name for _ in range(100) for name in shelf.take(10)] == names[:-1001:-1]
    assert added[0] <= 3000
