"""What has left a tree, beside a plain record of every prefix: random inserts, evictions, splits and merges."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hiradix.cache.departed import FIRST_TOKENS, WAYS, Departed, Departure, DepartureTable, page_names
from hiradix.cache.misses import Hit, Misses
from hiradix.explain import Reason
from hiradix.tree import BACKBONE, DEVICE, HOST, Granularity, RadixKey, RadixTree
from hiradix.tree.node import NAME_BYTES

PAGE = 4
NAMES = 1 << 16


class Pages:
    """Page ids that are free."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, count: int) -> np.ndarray:
        self.next += count
        return np.arange(self.next - count, self.next, dtype=np.int32)


def prefixes(key: RadixKey) -> list[tuple[object, ...]]:
    """Each page of a key with all that is before it, as the oracle names it."""
    size, space = PAGE, key.space
    return [
        (space, tuple(key.tokens[: end * size + space.lookahead].tolist()), key.extras_of(0, end))
        for end in range(1, key.num_pages(size) + 1)
    ]


def paths(tree: RadixTree) -> set[tuple[object, ...]]:
    """Every page of the tree, likewise."""
    found: set[tuple[object, ...]] = set()
    for node in tree.nodes():
        found.update(prefixes(tree.path_key(node))[node.start : node.end])
    return found


def random_key(rng: random.Random) -> RadixKey:
    """Few tokens, so that prompts share beginnings; some in namespaces, with extras, or wide."""
    tokens = [rng.choice((1, 2)) for _ in range(rng.randrange(0, 3) * PAGE)]
    tokens += [rng.choice((1, 2, 3)) for _ in range(rng.randrange(1, 30))]
    if rng.random() < 0.1:
        tokens[rng.randrange(len(tokens))] = 1 << 40
    extras = [b"image", None, b"other"] if rng.random() < 0.1 else None
    key = RadixKey(tokens, rng.choice((None, None, "a")), cache_salt=rng.choice((None, None, "b")),
                   page_extras=extras)  # fmt: skip
    return key.bigrams() if rng.random() < 0.2 and len(tokens) > 1 else key


@pytest.mark.parametrize("seed", range(12))
def test_what_has_left_is_known_with_its_reason_and_nothing_else_is(seed: int) -> None:
    rng = random.Random(seed)
    now = [0.0]
    tree = RadixTree(PAGE, granularity=Granularity(long_path=2))
    departed, pages = Departed(tree, lambda: now[0], NAMES), Pages()
    there: set[tuple[object, ...]] = set()
    left: dict[tuple[object, ...], tuple[Reason, float]] = {}
    keys = []
    for step in range(150):
        now[0] = float(step)
        key = random_key(rng) if not keys or rng.random() < 0.7 else rng.choice(keys)
        keys.append(key)
        act = rng.random()
        if act < 0.6:
            aligned = key.page_aligned(PAGE)
            count = aligned.num_pages(PAGE)
            if count:
                tree.unlock(tree.insert(aligned, DEVICE, [pages.take(count)]).lock)
            reason = Reason.EVICTED
        elif act < 0.9:
            reason = rng.choice((Reason.EVICTED, Reason.FORGOTTEN))
            with departed.because(reason):
                tree.evict(BACKBONE, DEVICE, rng.randrange(1, 12))
        elif act < 0.93:
            reason = Reason.FLUSHED
            departed.leaving_all(reason)
            tree.clear()
        else:
            tree.match(key)  # splits
            reason = Reason.EVICTED
        after = paths(tree)
        left.update(dict.fromkeys(there - after, (reason, now[0])))
        there = after
        asked = rng.choice(keys)
        tree.match(asked)
        node = tree.find(asked)
        expected = []
        for prefix in prefixes(asked)[node.end :]:
            if prefix not in left:
                break
            expected.append(left[prefix])
        found = departed.leading(node, asked, asked.num_pages(PAGE))
        assert [(one.reason, one.at_s) for one in found] == expected
    assert left and any(reason is Reason.FORGOTTEN for reason, _ in left.values())


@pytest.mark.parametrize("seed", range(4))
def test_names_on_nodes_are_those_of_their_keys_whatever_is_split_and_merged(seed: int) -> None:
    rng = random.Random(seed)
    tree = RadixTree(PAGE, granularity=Granularity(long_path=2))
    departed, pages = Departed(tree, lambda: 0.0, NAMES), Pages()
    for _ in range(120):
        key = random_key(rng).page_aligned(PAGE)
        if key.num_pages(PAGE):
            tree.unlock(tree.insert(key, DEVICE, [pages.take(key.num_pages(PAGE))]).lock)
        for node in rng.sample(nodes := list(tree.nodes()), min(3, len(nodes))):
            departed.names(node)
        for node in nodes:
            path = tree.path_key(node)
            whole = page_names(path.space.seed + b"bigram" * path.is_bigram, path, 0, node.end, PAGE)
            own = whole[node.start * NAME_BYTES : node.end * NAME_BYTES]
            assert own.startswith(node.names)


def test_what_is_still_in_another_tier_has_not_left() -> None:
    tree = RadixTree(PAGE)
    departed = Departed(tree, lambda: 0.0, NAMES)
    key = RadixKey(range(2 * PAGE))
    tree.unlock(tree.insert(key, DEVICE, [np.arange(2, dtype=np.int32)]).lock)
    node = tree.find(key)
    tree.adopt(node, BACKBONE, HOST, np.arange(2, dtype=np.int32))
    tree.demote(node)
    assert departed.leading(tree.root, key, 2) == [], "the host has it"
    tree.evict(BACKBONE, HOST, 2)
    assert [one.tier for one in departed.leading(tree.root, key, 2)] == [HOST, HOST]


@pytest.mark.parametrize("seed", range(4))
def test_a_table_forgets_the_oldest_of_a_bucket_and_keeps_its_size(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = DepartureTable(16 * WAYS)
    size = table.num_bytes
    buckets: dict[int, dict[int, float]] = {}
    for step in range(60):
        names = rng.integers(1, 400, rng.integers(1, 40)).astype(np.uint64)
        table.add([(names.tobytes(), Departure(Reason.EVICTED, DEVICE, float(step)))])
        unique = np.unique(names).tolist()
        known = [name for name in unique if name in buckets.get(name % 16, {})]
        for name in [*known, *(name for name in unique if name not in known)]:
            bucket = buckets.setdefault(name % 16, {})
            if name not in bucket and len(bucket) == WAYS:
                del bucket[next(iter(bucket))]
            bucket[name] = float(step)
        for name in range(1, 400):
            found = table.leading(np.array([name], np.uint64))
            assert [one.at_s for one in found] == [
                at for n, at in buckets.get(name % 16, {}).items() if n == name
            ]
    assert table.num_bytes == size


def test_a_beginning_is_known_in_other_namespaces_while_it_is_there() -> None:
    tree = RadixTree(PAGE)
    departed = Departed(tree, lambda: 0.0, NAMES)
    count = FIRST_TOKENS // PAGE
    key = RadixKey(range(FIRST_TOKENS + PAGE), cache_salt="a")
    for end in (1, count + 1):  # two nodes
        pages = np.arange(end, dtype=np.int32)
        tree.unlock(tree.insert(key.head(end, PAGE), DEVICE, [pages if end == 1 else pages[1:]]).lock)
        assert departed.is_in_other_namespace(RadixKey(range(FIRST_TOKENS))) is (end > 1)
    assert not departed.is_in_other_namespace(key)
    assert departed.is_in_other_namespace(RadixKey(range(FIRST_TOKENS), "adapter", cache_salt="a"))
    assert not departed.is_in_other_namespace(RadixKey(range(1, FIRST_TOKENS + 1)))
    other = [*range(FIRST_TOKENS - 1), 0]
    assert not departed.is_in_other_namespace(RadixKey(other)), "a first token or page in common says nothing"
    assert not departed.is_in_other_namespace(RadixKey(range(FIRST_TOKENS - 1))), "too short"
    tree.match(key.head(2, PAGE))  # splits
    tree.evict(BACKBONE, DEVICE, count)
    assert not departed.is_in_other_namespace(RadixKey(range(FIRST_TOKENS))), "it is there no more"
    assert not departed._first_spaces


@pytest.mark.parametrize("width", [1, 1 << 40])
def test_a_prompt_that_ends_within_a_node(width: int) -> None:
    """One that was not looked up: the tree has it and more, in one node."""
    tree = RadixTree(PAGE)
    departed = Departed(tree, lambda: 0.0, NAMES)
    key = RadixKey([width, *range(6 * PAGE - 1)])
    tree.unlock(tree.insert(key, DEVICE, [np.arange(6, dtype=np.int32)]).lock)
    misses = Misses(tree, departed, "lru")

    def spans(tokens: list[int]) -> list[tuple[int, int, Reason | None, str]]:
        found = misses.explain("r", RadixKey(tokens), len(tokens), Hit(0, 0, 0))
        return [(one.start, one.end, one.reason, one.detail) for one in found.spans]

    own = key.tokens.tolist()
    assert spans(own[: 3 * PAGE]) == [(0, 3 * PAGE, Reason.BOUNDARY, "")]
    parted = [*own[: 2 * PAGE + 1], 77, *own[2 * PAGE + 2 : 4 * PAGE]]
    assert spans(parted) == [
        (0, 2 * PAGE, Reason.BOUNDARY, ""),
        (2 * PAGE, 4 * PAGE, Reason.PARTED, f"differs at token {2 * PAGE + 1} from a cached prompt"),
    ]
    tree.cut(tree.find(key), 3)
    tree.evict(BACKBONE, DEVICE, 3)
    tree.match(key)
    assert [one[:3] for one in spans(own)] == [
        (0, 3 * PAGE, Reason.BOUNDARY),
        (3 * PAGE, 6 * PAGE, Reason.EVICTED),
    ]
