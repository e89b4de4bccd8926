"""What enters the tree: namespaces are text, counts are whole and not negative, pages are ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hiradix.errors import BadNamespace, Misuse
from hiradix.tree import (
    FULL,
    Component,
    Granularity,
    LruOrder,
    Namespace,
    RadixKey,
    RadixTree,
    Tier,
    TokenLog,
)
from hiradix.tree.key import namespace, private
from hiradix.tree.order import OrderContext, OrderFactory

DEVICE = Tier.DEVICE
NOT_TEXT = ["\ud800", "a\udfff", "x" * 300 + "\udc80", 7, 0, False, 1.5, b"x", ("lora", 1), [], object]


@pytest.mark.parametrize("value", NOT_TEXT, ids=ascii)
@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
def test_a_namespace_is_text(field: str, value: Any) -> None:
    for door in (RadixKey, TokenLog):
        with pytest.raises(BadNamespace, match=f"^{field}: ") as caught:
            door([1, 2, 3], **{field: value})
        assert caught.value.field == field


@pytest.mark.parametrize("text", ["", "salt", "\0", "ключ", "\U0001f600", "x" * 1000, np.str_("of numpy")])
def test_any_whole_text_names_one(text: str) -> None:
    key = RadixKey([1], text, cache_salt=text)
    assert key.extra_key == key.cache_salt == text and len(key.space.seed) == 32
    assert private(text) == text


def test_what_stands_for_no_text_is_text_and_one_of_its_own() -> None:
    values = [*NOT_TEXT, 1, "1", b"1", ("lora", 2)]
    names = [private(value) for value in values]
    assert len(set(names)) == len(names) and private(None) is None
    assert all(namespace(name, None, False).seed for name in names)
    assert names == [private(value) for value in values]


@pytest.mark.parametrize("count", [-1, -4, -5, np.int64(-1), np.int8(-128)])
def test_no_key_has_fewer_tokens_than_none(count: Any) -> None:
    log = TokenLog([1, 2, 3])
    log.extend([4])
    with pytest.raises(ValueError, match="negative"):
        log.key(count)
    for tokens in ([1, 2, 3], array("q", [1, 2, 3]), np.arange(3)):
        with pytest.raises(ValueError, match="negative"):
            RadixKey.first(tokens, count, Namespace())
    grown = array("q", [1, 2])
    key = RadixKey.first(grown, 2, Namespace())
    with pytest.raises(ValueError, match="negative"):
        key.resume(grown, count, Namespace())
    with pytest.raises(ValueError, match="negative"):
        key.head(count, 1)


def test_counts_of_numpy_are_counts() -> None:
    log = TokenLog(range(8))
    assert len(log.key(np.int64(3))) == 3 and log.key(np.uint8(200)).num_tokens == 8
    tree = RadixTree(np.int64(2))  # type: ignore[arg-type]
    lock = tree.insert(log.key(), DEVICE, [np.arange(4)], priority=np.int32(3)).lock
    tree.prioritise(lock, np.int64(4), np.int64(0))
    assert tree.pages(lock.node, DEVICE, np.int64(1)).tolist() == [1, 2, 3]
    tree.unlock(lock)
    tree.hit(lock.node, np.int16(9))
    assert lock.node.priority == 9
    assert sum(len(freed.pages) for freed in tree.evict(0, DEVICE, np.int64(4))) == 4
    tree.check([])


@pytest.mark.parametrize("count", [1.5, 2.0, "2", None])
def test_what_is_no_whole_number_is_no_count(count: Any) -> None:
    with pytest.raises(TypeError):
        RadixKey.first([1, 2, 3], count, Namespace())
    with pytest.raises(TypeError):
        RadixTree(2).evict(0, DEVICE, count)


class Wasteful:
    """Least recently used first; so many times what is wanted leaves. No subclass: LruOrder may be compiled."""

    def __init__(self, context: OrderContext, waste: int):
        self.waste = waste
        self._order = LruOrder(context)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._order, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._order)


def wasteful(waste: int) -> OrderFactory:
    return lambda context: Wasteful(context, waste)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "own, waste, gone", [(None, 1, 3), (None, 2, 5), (None, 4, 10), (4, 1, 10), (1, 4, 3)]
)
def test_an_order_says_how_much_leaves_with_a_victim(own: int | None, waste: int, gone: int) -> None:
    """Of a node of 10 pages, of which 3 are wanted; `Granularity` has the last word."""
    tree = RadixTree(1, order=wasteful(waste), granularity=Granularity(waste=own))
    tree.unlock(tree.insert(RadixKey(range(10)), DEVICE, [np.arange(10)]).lock)
    victims = tree.coldest(0, DEVICE, 3)
    assert sum(node.num_pages for node in victims) == gone
    assert sum(len(freed.pages) for freed in tree.evict(0, DEVICE, 3)) == gone
    tree.check([])


@pytest.mark.parametrize("waste", [0, -1])
def test_less_than_is_wanted_is_no_waste(waste: int) -> None:
    """Found: the first eviction split a node at its end."""
    with pytest.raises(Misuse, match="^waste: "):
        RadixTree(1, order=wasteful(waste))
    with pytest.raises(Misuse, match="^waste: "):
        RadixTree(1, granularity=Granularity(waste=waste))


@pytest.mark.parametrize("pages", [[-1], [3, -7], [2**31], [-(2**40)], [*range(100), -1]], ids=str)
def test_what_is_no_page_id_is_refused_and_changes_nothing(pages: list[int]) -> None:
    tree = RadixTree(1)
    before = tree.render()
    with pytest.raises(AssertionError, match="no page id"):
        tree.insert(RadixKey(range(len(pages))), DEVICE, [np.array(pages)])
    assert tree.render() == before
    tree.check([])


def held(tree: RadixTree, tier: Tier, tokens: list[int], pages: list[int], **more: Any) -> list[int]:
    """Insert, and hold no lock; the duplicates."""
    done = tree.insert(RadixKey(tokens), tier, [np.array(pages, np.int32)], **more)
    tree.unlock(done.lock)
    return done.duplicates[0].tolist()


@pytest.mark.parametrize("limit", [None, 64], ids=["any page", "of a pool"])
@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize(
    ("tokens", "pages"),
    [
        pytest.param([5, 6, 7, 8], [9, 1], id="below another root"),
        pytest.param([1, 2, 3, 4, 5, 6], [1, 3, 3], id="deeper on its own path"),
        pytest.param([1, 2, 9, 9], [1, 3], id="behind a split"),
        pytest.param([1, 2, 3, 4], [3, 1], id="as a duplicate"),
        pytest.param([1, 2, 3, 4], [1, 1], id="as a duplicate of its neighbour's"),
        pytest.param([1, 2, 3, 4, 5, 6], [1, 9, 9], id="twice: one known, one new"),
        pytest.param([5, 6, 7, 8], [9, 9], id="twice in one insert"),
        pytest.param([*range(20, 220)], [*range(12, 62), *range(12, 62)], id="twice among many"),
    ],
)
def test_a_page_under_two_prefixes_is_refused(
    tier: Tier, tokens: list[int], pages: list[int], limit: int | None
) -> None:
    tree = RadixTree(2)
    if limit is not None:
        tree.limit_pages(0, tier, limit)
    assert held(tree, tier, [1, 2, 3, 4], [1, 3]) == []
    tree.match(RadixKey(tokens))  # which an insert does first, too
    before = tree.render()
    with pytest.raises(Misuse, match="in the tree already|named twice"):
        held(tree, tier, tokens, pages)
    assert tree.render() == before and tree.all_pages(tier).tolist() == [1, 3]
    tree.check([])
    held(tree, tier, [5, 6, 7, 8], [10, 9])  # none of what was refused is thought to be taken
    tree.check([])


def test_what_has_left_may_come_again() -> None:
    tree = RadixTree(2)
    assert held(tree, DEVICE, [1, 2, 3, 4], [1, 3]) == []
    assert held(tree, DEVICE, [1, 2, 3, 4], [1, 3]) == []  # its own
    assert held(tree, DEVICE, [1, 2, 3, 4], [8, 3]) == [8]
    assert held(tree, Tier.HOST, [1, 2, 3, 4], [1, 3]) == []  # of another tier
    assert [freed.pages.tolist() for freed in tree.evict(0, DEVICE, 2)] == [[1, 3]]
    assert held(tree, DEVICE, [5, 6, 7, 8], [3, 1]) == []
    tree.clear()
    assert held(tree, DEVICE, [1, 2, 3, 4], [3, 1]) == []
    tree.check([])


@pytest.mark.parametrize("page", [64, 65, 2**31 - 1, 2**31, 2**40, -1, -(2**31), -(2**40)])
@pytest.mark.parametrize("count", [1, 100])
def test_a_page_of_no_pool_is_refused(page: int, count: int) -> None:
    tree = RadixTree(1)
    tree.limit_pages(0, DEVICE, 64)
    pages = np.arange(count)
    pages[count // 2] = page
    with pytest.raises(AssertionError, match="no page id"):
        tree.insert(RadixKey(range(count)), DEVICE, [pages])
    assert tree.render() == RadixTree(1).render()
    tree.check([])


def test_a_component_whose_page_is_taken_leaves_the_others_alone() -> None:
    tree = RadixTree(1, (FULL, Component("swa", 2)))
    pages = np.arange(4, dtype=np.int32)
    tree.unlock(tree.insert(RadixKey([1, 2, 3, 4]), DEVICE, [pages, pages[2:]]).lock)
    with pytest.raises(Misuse, match="DEVICE component swa: pages .3. are in the tree already"):
        tree.insert(RadixKey([5, 6]), DEVICE, [np.array([8, 9]), np.array([8, 3])])
    tree.check([])
    tree.unlock(tree.insert(RadixKey([5, 6]), DEVICE, [np.array([8, 9]), np.array([8, 9])]).lock)
    tree.check([])


def test_what_is_adopted_is_held_against_the_tree_too() -> None:
    tree = RadixTree(2)
    for tokens, page in ([1, 2], 7), ([3, 4], 8):
        held(tree, DEVICE, tokens, [page])
    first, second = (tree.match(RadixKey(tokens)).device_node for tokens in ([1, 2], [3, 4]))
    assert len(tree.adopt(first, 0, Tier.HOST, np.array([5]))) == 0
    with pytest.raises(Misuse, match=r"HOST component full: pages \[5\] are in the tree already"):
        tree.adopt(second, 0, Tier.HOST, np.array([5]))
    tree.check([])
    assert tree.adopt(first, 0, Tier.HOST, np.array([6])).tolist() == [6]
    tree.check([])


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("known", [1, 40])
@pytest.mark.parametrize("page", [-1, 64, 2**31, -(2**40)])
def test_a_page_of_no_pool_behind_known_ones_changes_nothing(tier: Tier, known: int, page: int) -> None:
    tree = RadixTree(1)
    tree.limit_pages(0, tier, 64)
    held(tree, tier, [*range(known)], [*range(known)])
    before = tree.render()
    with pytest.raises(AssertionError, match="no page id"):
        tree.insert(RadixKey(range(known + 1)), tier, [np.array([*range(known), page])])
    assert tree.render() == before
    tree.check([])


@pytest.mark.parametrize("page", [-1, 2**31, 2**40])
def test_what_is_no_page_of_one_component_leaves_the_others_alone(page: int) -> None:
    tree = RadixTree(1, (FULL, Component("swa", 2)))
    with pytest.raises(AssertionError, match="no page id"):
        tree.insert(RadixKey([5, 6]), DEVICE, [np.array([8, 9]), np.array([8, page])])
    tree.check([])
    tree.unlock(tree.insert(RadixKey([5, 6]), DEVICE, [np.array([8, 9]), np.array([8, 9])]).lock)
    tree.check([])


def test_device_pages_below_a_gap_are_not_adopted() -> None:
    tree = RadixTree(1)
    held(tree, DEVICE, [1], [7])
    held(tree, Tier.HOST, [1, 2, 3, 4], [0, 1, 2, 3])
    node = tree.match(RadixKey([1, 2, 3, 4])).loadable_node
    before = tree.render()
    with pytest.raises(Misuse, match="device pages from page 2 on"):
        tree.adopt(node, 0, DEVICE, np.array([5, 6]))
    assert tree.render() == before
    tree.check([])
    assert len(tree.adopt(node, 0, DEVICE, np.array([4, 5, 6]))) == 0
    tree.check([])


def test_a_cleared_tree_takes_any_page_whatever_went_wrong_before() -> None:
    tree = RadixTree(1)
    lock = tree.insert(RadixKey([1, 2, 3]), DEVICE, [np.arange(3)]).lock
    with pytest.raises(Misuse, match="locked"):
        tree.drop(tree.match(RadixKey([1])).device_node)
    tree.clear()
    tree.unlock(lock)
    tree.check([])
    assert held(tree, DEVICE, [4, 5, 6], [2, 1, 0]) == []
    tree.check([])
