"""The order in which pages leave a full store: against a plain model, and by what no chain may lose."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.storage import Batch
from hiradix.storage.kit.lru import SKEW_NS, LruEntry, LruIndex

NOW_NS = 1_700_000_000 * 10**9
DAY_NS = 24 * 3600 * 10**9
NAMES = st.integers(0, 11).map(str)
MOVES = st.one_of(
    st.tuples(st.just("use"), NAMES, st.integers(1, 9), st.integers(-5, 5)),
    st.tuples(st.just("drop"), NAMES),
    st.tuples(st.just("take"), st.integers(0, 30), st.integers(0, 9), st.sets(NAMES, max_size=3)),
    st.tuples(st.just("read anew"), st.sets(NAMES)),
)


def coldest_first(model: dict[str, LruEntry]) -> Iterator[str]:
    return iter(sorted(model, key=lambda name: (model[name].used_ns, name)))


def taken(model: dict[str, LruEntry], num_bytes: int, slack: int, keep: set[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in coldest_first(model):
        freed, size = sum(found.values()), model[name].num_bytes
        if freed >= num_bytes + slack or name in keep:
            break
        if freed >= num_bytes and freed + size > num_bytes + slack:
            break
        found[name] = size
    return found


@settings(max_examples=300, deadline=None)
@given(st.lists(MOVES, max_size=120))
def test_it_is_a_plain_order_of_use(moves: list[tuple]) -> None:  # type: ignore[type-arg]
    index, model, now_ns = LruIndex(), dict[str, LruEntry](), NOW_NS
    for kind, *more in moves:
        now_ns = index.now(now_ns)
        if kind == "use":
            name, size, ahead = more
            old = model.get(name, LruEntry(0, 0))
            index.use(name, LruEntry(size, now_ns + ahead))
            model[name] = LruEntry(size, max(now_ns + ahead, old.used_ns))
        elif kind == "drop":
            gone = model.pop(more[0], LruEntry(0, 0))
            assert index.drop(more[0]) == gone.num_bytes
        elif kind == "take":
            expected = taken(model, *more)
            assert list(index.take(*more).items()) == list(expected.items())
            model = {name: entry for name, entry in model.items() if name not in expected}
        else:
            found = {name: LruEntry(3, now_ns - 1) for name in more[0]}
            index.replace_all(found, now_ns)
            model = {n: LruEntry(3, max(now_ns - 1, model.get(n, e).used_ns)) for n, e in found.items()}
        assert index.coldest() == next(coldest_first(model), None)
        assert index.num_bytes == sum(entry.num_bytes for entry in model.values())
        assert len(index) == len(model) and all(name in index for name in model)
        assert {name: index.size(name) for name in model} == {n: e.num_bytes for n, e in model.items()}


def chain(number: int, shared: int, length: int) -> list[str]:
    """Names of a prompt whose first `shared` pages are everybody's."""
    return [f"all {at}" if at < shared else f"{number} {at}" for at in range(length)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_chain_loses_its_head_before_its_end(data: st.DataObject) -> None:
    """Uses of several chains with common heads come in pieces and meanwhile of each other, by a clock that
    is set back a little now and then: what is left of each begins with its first page."""
    index, now_ns = LruIndex(), NOW_NS
    shared = data.draw(st.integers(0, 6))
    chains = [chain(n, shared, shared + data.draw(st.integers(1, 12))) for n in range(4)]
    numbers = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    under_way = [Batch.of(chains[number]) for number in numbers]
    while under_way:
        at = data.draw(st.integers(0, len(under_way) - 1))
        rest = under_way.pop(at)
        step = data.draw(st.integers(1, 5))
        now_ns += data.draw(st.sampled_from([-SKEW_NS // 200, -1, 0, 1, 10**6, 10**9]))
        part = rest[:step]
        for name, used_ns in zip(part, part.used_ns(index, index.now(now_ns))):
            index.use(name, LruEntry(1, used_ns))
        if rest[step:]:
            under_way.append(rest[step:])
    index.take(data.draw(st.integers(0, len(index))), 0, ())
    for number in numbers:
        there = [name in index for name in chains[number]]
        assert there == sorted(there, reverse=True), there


def test_a_clock_that_is_set_back_by_a_day_makes_no_new_page_the_oldest() -> None:
    index = LruIndex()
    for name in "ab":
        index.use(name, LruEntry(1, index.now(NOW_NS + DAY_NS)))
    for name in "cd":
        index.use(name, LruEntry(1, index.now(NOW_NS)))
    assert list(index.take(4, 0, ())) == ["a", "b", "c", "d"]


def test_a_clock_that_is_set_back_a_little_makes_no_new_page_the_oldest() -> None:
    index = LruIndex()
    for number, name in enumerate("abcd"):
        index.use(name, LruEntry(1, index.now(NOW_NS - number * 10**9)))
    assert list(index.take(4, 0, ())) == ["a", "b", "c", "d"]


def test_uses_that_are_over_take_no_memory() -> None:
    index = LruIndex()
    for _ in range(10_000):
        for name in "abc":
            index.use(name, LruEntry(1, index.now(NOW_NS)))
    assert len(index._order) <= 2 * len(index) + 64


def test_pages_that_have_left_take_no_memory_behind_one_that_all_share() -> None:
    """A system prompt, behind which conversations come and go."""
    index = LruIndex()
    for number in range(1000):
        now_ns = index.now(NOW_NS)
        index.use("shared", LruEntry(1, now_ns))
        index.use(str(number), LruEntry(1, now_ns - 1), "shared")
        if number >= 10:
            assert list(index.take(1, 0, ())) == [str(number - 10)]
    assert set(index._parting["shared"]) == {str(number) for number in range(990, 1000)}


def descendants(name: str, fronts: dict[str, str], there: LruIndex) -> list[str]:
    """What is there behind a page, without a gap in between."""
    behind = [page for page, front in fronts.items() if front == name and page in there]
    return behind + [page for own in behind for page in descendants(own, fronts, there)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_page_leaves_before_what_follows_it(data: st.DataObject) -> None:
    """Conversations that part and go on: of each, some pages are used by themselves, as those are that a
    later turn adds, and room is made in between."""
    index, fronts = LruIndex(), dict[str, str]()
    paths: list[list[str]] = [[]]
    for number in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()):
            path = data.draw(st.sampled_from(paths))
            path = path[: data.draw(st.integers(0, len(path)))]
            used = [f"{number} {at}" for at in range(data.draw(st.integers(1, 4)))]
            fronts |= dict(zip(used, [path[-1] if path else "", *used]))
            paths.append(path + used)
        else:
            path = data.draw(st.sampled_from(paths))
            start = data.draw(st.integers(0, len(path)))
            used = path[start : data.draw(st.integers(start, len(path)))]
        now_ns = index.now(NOW_NS)
        if used:
            index.follow(fronts[used[0]], now_ns)
        for name in list(index.take(data.draw(st.integers(0, 3)), 0, used, now_ns + 1)):
            assert not descendants(name, fronts, index), f"{name} left before what follows it"
        for rank, name in enumerate(used):
            index.use(name, LruEntry(1, now_ns - rank), fronts[name])
    while (coldest := index.coldest()) is not None:
        assert not descendants(coldest, fronts, index), f"{coldest} would leave before what follows it"
        index.drop(coldest)


def test_what_makes_room_for_a_page_is_not_in_front_of_it() -> None:
    index = LruIndex()
    for rank, name in enumerate("abc"):
        index.use(name, LruEntry(1, NOW_NS - rank), "abc"[rank - 1] if rank else "")
    index.use("x", LruEntry(1, NOW_NS + 10))
    index.follow("c", NOW_NS + 20)
    assert list(index.take(4, 0, (), NOW_NS + 21)) == ["x"]
    assert list(index.take(4, 0, ())) == ["c", "b", "a"]


def test_what_is_no_chain_and_goes_in_a_ring_leaves_too() -> None:
    index = LruIndex()
    for names in ("abc", "cba", "bca"):
        for rank, name in enumerate(names):
            index.use(name, LruEntry(1, index.now(NOW_NS)), names[rank - 1])
    assert sorted(index.take(3, 0, ())) == ["a", "b", "c"]


def test_a_conversation_of_many_turns_is_gone_through_once() -> None:
    """When its first page is the coldest: not once for each of its turns or pages."""
    index, fronts = LruIndex(), ["", *map(str, range(3000))]
    for turn in range(0, 3000, 10):
        now_ns = index.now(NOW_NS + turn * 10**9)
        for rank, (front, name) in enumerate(list(zip(fronts, fronts[1:]))[turn : turn + 10]):
            index.use(name, LruEntry(1, now_ns - rank), front)
    moved, put_in_order = [0], index._put_in_order

    def counted(name: str, used_ns: int) -> None:
        moved[0] += 1
        put_in_order(name, used_ns)

    index._put_in_order = counted  # type: ignore[method-assign]
    assert list(index.take(1000, 0, ())) == fronts[:-1001:-1]
    assert moved[0] <= 3000
