"""GHD in a tree: what it keeps, what it forgets, and who may mislead it."""

from __future__ import annotations

import gc
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.apps.replay.generate import generate
from hiradix.apps.replay.play import Player
from hiradix.apps.replay.simulated_cache import Tiers
from hiradix.apps.traces.trace import Trace
from hiradix.cache import HierarchicalCache
from hiradix.errors import ConfigError
from hiradix.memory import PageAllocator
from hiradix.policy.eviction import GhdPolicy, make_order
from hiradix.policy.ghd_tables import ClassTables
from hiradix.policy.ghosts import EMPTY, NAME_BYTES, BlockNames, Ghosts, extend
from hiradix.policy.uses import HINTS, Finished, LastUse, RequestUse, UseLog
from hiradix.tree import RadixKey, RadixTree, Tier, ids

DEVICE, HOST = Tier.DEVICE, Tier.HOST


class Small:
    """A cache of `num_pages` pages, one token each standing for 512."""

    def __init__(self, num_pages: int, policy: str = "ghd"):
        config = {} if policy == "lru" else {"page_tokens": 512}
        self.tree = RadixTree(1, order=make_order(policy, config))
        self.pages = PageAllocator(num_pages)
        self.cache = HierarchicalCache(self.tree, self.pages)

    @property
    def learner(self) -> UseLog:
        assert self.cache.learner is not None
        return self.cache.learner

    def request(
        self, tokens: list[int], hint: str | None = None, salt: str | None = None, stop: str = ""
    ) -> int:
        """Pages it found."""
        key = RadixKey(tokens, cache_salt=salt)
        match = self.cache.match(key)
        lock = self.tree.lock(match.device_node, DEVICE)
        short = len(key) - match.device_node.end
        self.cache.make_room(short)
        pages = self.pages.alloc(short) if short else np.empty(0, np.int32)
        assert pages is not None
        ended = Finished(512 * len(key), 100, hint, stop=stop)
        done = self.cache.insert(key, pages, at=lock, ended=ended)
        self.tree.unlock(lock)
        self.tree.unlock(done)
        return match.device_node.end

    def leaves(self) -> list[object]:
        return [n for n in self.tree.nodes() if n.device.pages is not None and not n.num_device_children]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(["ghd", "2q"]))
def test_only_unlocked_leaves_leave_and_what_is_foretold_does(seed: int, policy: str) -> None:
    rng, small = random.Random(seed), Small(60, policy)
    held = []
    for _ in range(40):
        small.request([rng.randint(0, 2) for _ in range(rng.randint(1, 12))])
        if held and rng.random() < 0.4:
            small.tree.unlock(held.pop())
        if len(held) < 3 and rng.random() < 0.3:
            held.append(small.tree.lock(rng.choice(list(small.tree.nodes())), DEVICE))
        wanted = rng.randint(1, 4)
        foretold = small.tree.coldest(0, DEVICE, wanted)
        locked = [n for lock in held for n in small.tree.path(lock.node)]
        assert not set(foretold) & set(locked)
        first = foretold[0] if foretold else None
        assert first is None or first in small.leaves()
        small.cache.evict(wanted)
        assert all(n.device.pages is None for n in foretold)
        assert all(n.device.pages is not None for n in locked)
        small.cache.check()


def talks_that_come_back(policy: str) -> int:
    """Short talks return after three times what the cache holds has passed; long prompts never do."""
    small, hits, waiting = Small(150, policy), 0, []
    for i in range(500):
        talk = [1, *(i * 10 + k for k in range(5))]
        small.request(talk)
        waiting.append(talk)
        small.request([2, *(10**6 + i * 100 + k for k in range(24))])
        if len(waiting) > 15:
            hits += small.request(waiting.pop(0)) == 6
    return hits


def test_what_comes_back_is_kept_over_what_does_not() -> None:
    assert talks_that_come_back("lru") == 0 and talks_that_come_back("ghd") > 400


def decisions(trace: Trace, **config: object) -> str:
    return Player(trace, "ghd", Tiers(120_000, 300_000), config).play().decisions


def test_two_runs_decide_the_same() -> None:
    trace = generate("chat", 2, 400)
    assert decisions(trace) == decisions(trace)


@pytest.mark.parametrize(
    "warp", [lambda t: t * 0.1, lambda t: t * 10, lambda t: -t, lambda t: (t * 7919) % 60]
)
def test_no_clock_decides_anything(warp) -> None:
    """Time stamps scaled, running backwards or jumping: the same decisions."""
    trace = generate("chat", 2, 400)
    warped = Trace(
        trace.name, trace.source, 512, tuple(c._replace(time_s=warp(c.time_s)) for c in trace.calls)
    )
    assert decisions(trace) == decisions(warped)


def test_counting_waits_until_somebody_asks_who_leaves_but_not_for_ever() -> None:
    small = Small(2000)
    tables: ClassTables = small.learner.tables  # type: ignore[attr-defined]
    begun = tables.version
    for i in range(1023):
        small.request([i])
    assert tables.version == begun
    for _ in range(2):
        small.tree.coldest(0, DEVICE, 1)
        assert tables.version == begun + 1
    small.request([1023])
    assert tables.version == begun + 2


@pytest.mark.parametrize("asks_each", [1, 100, 2000])
def test_votes_halve_in_as_many_requests_however_often_they_are_counted(
    asks_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small(2000)
    factors: list[float] = []
    monkeypatch.setattr(small.learner.tables, "decay", factors.append)  # type: ignore[attr-defined]
    for i in range(1024):
        small.request([i])
        if i % asks_each == asks_each - 1:
            small.tree.coldest(0, DEVICE, 1)
    assert math.prod(factors) == pytest.approx(2 ** (-1024 / 4096))


def test_ghosts_and_what_they_keep_alive_are_bounded() -> None:
    small = Small(50)
    learner = small.cache.learner
    assert learner is not None
    learner.ghosts.limit = 100
    for i in range(400):
        small.request([1, *(i * 100 + k for k in range(20))])
    assert len(learner.ghosts) == learner.ghosts.limit <= 4 * 50
    small.cache.reset()
    assert len(learner.ghosts) == 0 and small.pages.available == 50
    small.request([1, 2, 3])
    small.cache.check()


def test_a_ghost_tells_that_a_conversation_goes_on() -> None:
    small = Small(30)
    small.request([1, 2, 3, 4, 5])
    small.cache.evict(30)
    small.request([1, 2, 3, 4, 5, 6, 7])
    (node,) = list(small.tree.nodes())[-1:]
    assert node.note.use.turn == 1 and len(small.cache.learner.ghosts) == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", ["ghd", "2q"])
def test_a_request_of_no_whole_page_is_counted_and_leaves_nothing(policy: str) -> None:
    small = Small(30, policy)
    small.learner.finished(small.tree, small.tree.root, RadixKey([]), Finished(300, 20))
    assert small.learner.clock == 320 and not list(small.tree.nodes())
    small.request([1, 2, 3])
    small.cache.check()


def test_a_touched_leaf_is_where_its_last_note_says() -> None:
    small = Small(30)
    small.request([1, 2, 3])
    (node,) = small.tree.nodes()
    order = next(o for o in small.learner.orders if o.tier == DEVICE)  # type: ignore[attr-defined]
    stale = node.device.rank.note
    node.note = LastUse(stale.use, stale.clock + 9, stale.class_id, stale.visits)
    order.touched([node.device])
    assert node.device.rank.note is node.note and small.tree.coldest(0, DEVICE, 1)
    kept = node.device.rank
    order.touched([node.device])
    assert node.device.rank is kept


def test_the_oldest_ghost_goes_first() -> None:
    ghosts: Ghosts[str] = Ghosts(2)
    assert ghosts.add(b"a", "a") is None and ghosts.add(b"b", "b") is None
    assert ghosts.add(b"c", "c") == "a" and ghosts.pop(b"a") is None and ghosts.pop(b"b") == "b"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 60))
def test_a_trail_names_each_prefix_alike_however_it_was_built(steps: list[int], cut: int) -> None:
    tokens = np.arange(sum(steps) * 4)
    key, grown, at = RadixKey(tokens), EMPTY, 0
    for step in steps:
        at += step
        grown = extend(grown, key, at, 2, 2)
    whole = extend(EMPTY, key, at, 2, 2)
    names = list(whole.names(0, at))
    assert list(grown.names(0, at)) == names and len(set(names)) == at == grown.num_blocks
    assert list(grown.head(cut).names(0, at)) == names[:cut]
    assert list(grown.names(cut, at + 5)) == names[cut:] and all(len(n) == NAME_BYTES for n in names)


def test_trails_of_other_namespaces_and_images_have_other_names() -> None:
    tokens = list(range(8))
    keys = [RadixKey(tokens), RadixKey(tokens, cache_salt="a"), RadixKey(tokens, page_extras=[b"i"])]
    assert len({extend(EMPTY, key, 2, 2, 2).last for key in keys}) == 3


def test_tables_survive_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "tables.npz")
    trace = generate("chat", 2, 600)
    first = Player(trace, "ghd", Tiers(120_000), {"tables": path})
    first.play()
    first.simulated.cache.close()
    again = Player(trace, "ghd", Tiers(120_000), {"tables": path})
    learned = first.simulated.cache.learner.tables  # type: ignore[union-attr]
    read = again.simulated.cache.learner.tables  # type: ignore[union-attr]
    assert len(read) == len(learned) > 20 and np.array_equal(read.index, learned.index)


def test_a_damaged_table_is_a_cold_start(tmp_path: Path) -> None:
    (tmp_path / "tables.npz").write_bytes(b"junk")
    policy = make_order("ghd", {"tables": str(tmp_path / "tables.npz")})
    RadixTree(1, order=policy)
    assert isinstance(policy, GhdPolicy) and len(policy.learner.tables) == 3


@pytest.mark.parametrize("config", [{"page_tokens": 0}, {"page_tokens": True}, {"tables": 3}, {"nosuch": 1}])
def test_a_bad_setting_is_named(config: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(config))):
        make_order("ghd", config)


# -- hints ------------------------------------------------------------------------------------


BEHAVIOURS: dict[str, Callable[[bool], str | None]] = {  # by whether the conversation ends here
    "says nothing": lambda ends: None,
    "tells the truth": lambda ends: "end_of_session" if ends else None,
    "says end where it goes on": lambda ends: None if ends else "end_of_session",
    "keeps what ends": lambda ends: "keep_alive" if ends else None,
    "keeps everything": lambda ends: "keep_alive",
}


def hits_by_tenant(fair: str, foul: str) -> dict[str, int]:
    """Hit blocks of two tenants with equal traffic, half of whose conversations end after one turn."""
    rng, going, small = random.Random(5), [], Small(260)
    does = {"fair": BEHAVIOURS[fair], "foul": BEHAVIOURS[foul]}
    found = {"fair": 0, "foul": 0}
    for i in range(3000):
        if going and rng.random() < 0.3:
            tenant, path = going.pop(0)
            found[tenant] += small.request([*path, 1], None, tenant)
            continue
        tenant = rng.choice(["fair", "foul"])
        path = [i * 10 + k for k in range(7)]
        ends = rng.random() < 0.6
        small.request(path, does[tenant](ends), tenant)
        if not ends:
            going.append((tenant, path))
    return found


def test_true_hints_pay() -> None:
    silent = hits_by_tenant("says nothing", "says nothing")
    assert hits_by_tenant("tells the truth", "says nothing")["fair"] > 1.1 * silent["fair"]


@pytest.mark.parametrize(
    "lie", [name for name in BEHAVIOURS if name not in ("says nothing", "tells the truth")]
)
def test_false_hints_cost_their_sender(lie: str) -> None:
    honest = hits_by_tenant("tells the truth", "tells the truth")
    quiet = hits_by_tenant("tells the truth", "says nothing")
    attacked = hits_by_tenant("tells the truth", lie)
    assert attacked["fair"] > 0.95 * quiet["fair"], "the liar took from the honest"
    assert attacked["foul"] < 1.05 * honest["foul"], "lying paid better than the truth"


def test_a_closed_conversation_goes_first_and_one_kept_alive_last() -> None:
    small = Small(1000)
    for i in range(300):  # hints that come true
        talk = [1, *(i * 100 + k for k in range(4))]
        small.request(talk, "end_of_session" if i % 2 else "keep_alive")
        if i % 2 == 0:
            small.request([*talk, i * 100 + 50])
    small.cache.evict(1000)
    talks = {name: [7, n, n + 1, n + 2] for n, name in ((900, "kept"), (910, "closed"), (920, "plain"))}
    for talk in talks.values():
        small.request(talk)
    assert small.learner.hint_prefix(small.tree, RadixKey(talks["closed"]), "end_of_session") == 4
    assert small.learner.hint_prefix(small.tree, RadixKey(talks["kept"]), "keep_alive") == 4
    gone = [small.tree.coldest(0, DEVICE, 1)[0]]
    small.cache.evict(3)
    assert gone[0].tokens.tolist()[0] in talks["closed"]
    assert small.cache.match(RadixKey(talks["kept"])).device_node.end == 4
    small.cache.check()


def test_hints_without_end_between_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiradix.policy.segments.CAPACITY", 64)
    small = Small(100)
    small.request([1, 2, 3])
    for i in range(500):
        assert small.learner.hint_prefix(small.tree, RadixKey([1, 2, 3]), HINTS[i % 2]) == 3
    for i in range(40):  # they are counted
        small.request([1, 2, 3, 4 + i])
    small.cache.check()


def test_a_check_changes_nothing_of_who_leaves() -> None:
    """Each rank of a server is checked when it is idle, which the others need not be just then."""

    def lives(is_checked: bool) -> list[tuple[int, bytes]]:
        rng = random.Random(3)
        tree = RadixTree(1, order=(policy := GhdPolicy({"page_tokens": 512})))
        stayed: list[tuple[int, bytes]] = []
        for number in range(900):
            first = int(rng.paretovariate(0.7)) % 300 * 1000
            tokens = np.arange(first, first + 6 + 3 * rng.randrange(3))
            key = RadixKey(tokens)
            pages = np.arange(20 * number, 20 * number + len(tokens), dtype=np.int32)
            lock = tree.lock(tree.root, DEVICE)
            done = tree.insert(key, DEVICE, [pages], lock)
            tree.unlock(lock)
            policy.learner.finished(tree, done.lock.node, key, Finished(512 * len(tokens), 1 + number % 300))
            tree.unlock(done.lock)
            if is_checked and number % 10 == 5:
                tree.check()
            if number % 300 > 250:
                tree.evict(0, DEVICE, 20)
                stayed += sorted((node.end, node.run) for node in tree.nodes())
        return stayed

    assert lives(False) == lives(True)


def test_a_policy_without_memory_has_no_learner() -> None:
    assert Small(4, "lru").cache.learner is None


@pytest.mark.parametrize("pair", ["lru,ghd", "ghd,lru", "lfu,2q", "2q,lru", "lru,lfu"])
def test_a_policy_per_tier(pair: str) -> None:
    player = Player(generate("chat", 3, 250), pair, Tiers(60_000, 200_000))
    played = player.play()
    player.simulated.cache.check()
    assert played.hits["host"].sum() > 0
    learner = player.simulated.cache.learner
    assert (learner is None) == (pair == "lru,lfu")
    player.simulated.cache.reset()
    assert learner is None or len(learner.ghosts) == 0
    player.simulated.cache.check()


@pytest.mark.parametrize("name", ["lru,lfu,mru", "ghd,2q", "ghd,ghd", "lru,", "nosuch,lru"])
def test_a_bad_pair_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="--radix-eviction-policy"):
        make_order(name)


def test_what_a_request_leaves_is_freed_without_the_collector_which_does_not_look_at_it() -> None:
    name = bytes(1000)
    before = sys.getrefcount(name)
    left = [LastUse(RequestUse(0, 1, 2, BlockNames((name,), 125)), 3, 4, 5) for _ in range(100)]
    assert sys.getrefcount(name) == before + 100
    if ids.IS_BUILT:
        note, request = left[0], Finished(1, 2, HINTS[0])
        assert not any(gc.is_tracked(part) for part in (note, note.use, note.use.blocks, request))
        del note
    gc.disable()
    try:
        left.clear()
        assert sys.getrefcount(name) == before
    finally:
        gc.enable()


def test_what_is_said_of_a_request_that_ends_is_text() -> None:
    told = Finished(512, 9, session="s", stop="tool_use")
    assert (told.session, told.stop, told.hint) == ("s", "tool_use", None)
    assert (Finished(512, 9).session, Finished(512, 9).stop) == ("", "")
    bad: list[tuple[Any, Any]] = [(None, ""), (7, ""), ("", None), ("", b"end_turn")]
    for session, stop in bad:
        with pytest.raises(TypeError):
            Finished(512, 9, None, session, stop)


def test_a_session_that_calls_a_tool_is_kept_over_one_whose_turn_is_over() -> None:
    """Both look alike but for why their answers ended; the tool's callers come back soon, the others never."""
    small = Small(64)
    for number in range(400):
        call, over = [4 * number, 1, 2], [4 * number + 1, 1, 2]
        small.request(call, stop="tool_use")
        small.request(over, stop="end_turn")
        small.request([*call, 3], stop="end_turn")
    small.request([9001, 1, 2], stop="tool_use")
    small.request([9002, 1, 2], stop="end_turn")
    for number in range(12):
        small.request([9100 + number, 1, 2, 3, 4], stop="end_turn")
    assert small.request([9001, 1, 2, 3], stop="end_turn") == 3
    assert small.request([9002, 1, 2, 3], stop="end_turn") == 0


@pytest.mark.parametrize("policy, left", [("lru", 4), ("ghd", 1)])
def test_of_a_leaf_only_what_is_wanted_leaves(policy: str, left: int) -> None:
    """The others take a leaf whole that holds at most four times what is wanted."""
    small = Small(40, policy)
    small.request([1, 2, 3, 4])
    foretold = small.tree.coldest(0, DEVICE, 1)
    assert sum(node.num_pages for node in foretold) == small.cache.evict(1) == left
    assert small.cache.match(RadixKey([1, 2, 3, 4])).device_node.end == 4 - left
    small.cache.check()


def test_time_is_counted_by_conversations_at_work_where_it_is_known_why_answers_end() -> None:
    """However long prompts are: a round of all that are at work takes as long with one of them as with four."""
    small = Small(4000)

    def takes(number: int, tokens: int, stop: str) -> int:
        before = small.learner.clock
        small.request([number, *range(tokens - 1)], stop=stop)
        return small.learner.clock - before

    assert takes(9, 5, "") == 512 * 5 + 100  # tokens of traffic, where it is not known
    assert takes(9, 6, "unheard_of") == 512 * 6 + 100
    rounds = [sum(takes(number, 2 + turn, "tool_use") for number in range(4)) for turn in range(80)]
    assert len(set(rounds[1:])) == 1
    alone = [takes(0, 100 + turn, "end_turn") for turn in range(140)]
    assert alone[-1] == rounds[-1]  # the others have not been at work for 128 requests
    assert alone[0] == rounds[-1] // 4
