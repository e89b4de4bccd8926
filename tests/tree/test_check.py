"""`check` sees each numbered invariant broken, and says which: the positive control of all who call it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hiradix.tree import Component, Node, RadixKey, RadixTree, Tier, hash_pages

DEVICE, HOST = Tier.DEVICE, Tier.HOST
WINDOW = 1
HASH = b"h" * 32


class Grown:
    """Three nodes of two pages on the device below one another, the last with a sibling; all on the host, and
    hashed. Of the window the last two pages are there. A lock on the first node."""

    def __init__(self) -> None:
        self.tree = RadixTree(2, (Component("full"), Component("window", reach=2)))
        self.nodes = [self._put(range(length), 10 * length) for length in (4, 8, 12)]
        self.sibling = self._put([*range(8), 50, 51], 200)
        self.lock = self.tree.lock(self.nodes[0], DEVICE)
        self.check()

    def _put(self, tokens: object, first: int) -> Node:
        key = RadixKey(list(tokens))  # type: ignore[call-overload]
        count = key.num_pages(2)
        ids = np.arange(first, first + count, dtype=np.int32)
        done = self.tree.insert(key, DEVICE, [ids, ids[-2:]])
        self.tree.adopt(done.lock.node, 0, HOST, ids)
        self.tree.unlock(done.lock)
        self.tree.set_hashes(done.lock.node, 0, hash_pages(self.tree.page_rows(done.lock.node, 0)))
        return done.lock.node

    def check(self) -> None:
        self.tree.check([self.lock])


def device_below_host(g: Grown) -> None:
    above = g.nodes[1].parent
    assert above is not None
    above.num_device_children -= 1
    g.nodes[1].device.pages = None


def a_node_without_pages(g: Grown) -> None:
    g.sibling.device.pages = g.sibling.host.pages = None
    g.nodes[1].num_device_children -= 1


def a_window_beside_nothing(g: Grown) -> None:
    backbone, window = g.nodes[2].host, g.nodes[2].residency(WINDOW, HOST)
    g.tree._residencies.orders[0][HOST].remove([backbone])
    backbone.pages, window.pages = None, np.array([1, 2], np.int32)
    g.tree._residencies.orders[WINDOW][HOST].push([window])


def evictable_and_in_no_order(g: Grown) -> None:
    g.tree._residencies.orders[0][DEVICE].remove([g.nodes[2].device])


def locked_and_in_the_order(g: Grown) -> None:
    g.tree._residencies.orders[0][DEVICE].push([g.nodes[0].device])


def in_another_order(g: Grown) -> None:
    g.tree._residencies.orders[0][DEVICE].remove([g.sibling.device])
    g.tree._residencies.orders[0][HOST].push([g.sibling.device])


def of_no_node(g: Grown) -> None:
    stranger = Node(None, 0, 2, 1)
    stranger.device.pages = np.array([1, 2], np.int32)
    g.tree._residencies.orders[0][DEVICE].push([stranger.device])


def a_parent_is_the_next_victim(g: Grown) -> None:
    order = g.tree._residencies.orders[0][DEVICE]
    for node in (g.nodes[2], g.sibling):
        order.remove([node.device])
        order.push([node.device])


def a_lock_that_nobody_has(g: Grown) -> None:
    g.tree.lock(g.nodes[2], HOST)


def a_lock_too_few(g: Grown) -> None:
    g.tree.lock(g.nodes[2], DEVICE)
    g.nodes[1].device.lock_ref = 0
    g.tree._residencies.orders[0][DEVICE].push([g.nodes[1].device])


def another_row(g: Grown) -> None:
    children = g.nodes[1].children
    row = g.sibling.row
    children[b"other"] = children.pop(row)


def a_gap_between_nodes(g: Grown) -> None:
    g.sibling.start += 1


def a_token_too_few(g: Grown) -> None:
    g.nodes[2].run = g.nodes[2].run[:-4]


def a_page_too_few(g: Grown) -> None:
    pages = g.nodes[2].device.pages
    assert pages is not None
    g.nodes[2].device.pages = pages[:1].copy()


def pages_of_another_array(g: Grown) -> None:
    g.nodes[2].device.pages = np.arange(1000, dtype=np.int32)[:2]


def another_parent(g: Grown) -> None:
    g.sibling.parent = g.nodes[0]


def a_total(g: Grown) -> None:
    g.tree._residencies.num_resident[0][DEVICE] += 1


def a_total_of_windows(g: Grown) -> None:
    g.tree._residencies.num_resident[WINDOW][DEVICE] -= 1


def device_children(g: Grown) -> None:
    g.nodes[1].num_device_children += 1


def half_a_hash(g: Grown) -> None:
    g.nodes[2].digests = g.nodes[2].digests[:40]


def hashes_of_more_pages(g: Grown) -> None:
    g.nodes[2].digests += HASH


def a_chain_that_begins_in_the_middle(g: Grown) -> None:
    alone = RadixTree(2)
    g.nodes[2].digests = b"".join(hash_pages(alone.rows(RadixKey(range(8, 12)), alone.root, 0, 2)))


def the_same_below_a_gap(g: Grown) -> None:
    a_chain_that_begins_in_the_middle(g)
    g.nodes[1].digests = b""


def a_hash_of_something_else(g: Grown) -> None:
    g.nodes[0].digests = g.nodes[0].digests[:32] + HASH


BROKEN: list[tuple[int, Callable[[Grown], None]]] = [
    (1, device_below_host), (2, a_node_without_pages), (3, a_window_beside_nothing),
    (4, evictable_and_in_no_order), (4, locked_and_in_the_order), (4, in_another_order), (4, of_no_node),
    (5, a_parent_is_the_next_victim), (6, a_lock_that_nobody_has), (6, a_lock_too_few), (7, another_row),
    (7, a_gap_between_nodes), (7, a_token_too_few), (7, a_page_too_few), (7, pages_of_another_array),
    (7, another_parent), (8, a_total), (8, a_total_of_windows), (8, device_children), (9, half_a_hash),
    (9, hashes_of_more_pages), (9, a_chain_that_begins_in_the_middle), (9, the_same_below_a_gap),
    (9, a_hash_of_something_else),
]  # fmt: skip


@pytest.mark.parametrize(("number", "harm"), BROKEN, ids=lambda part: getattr(part, "__name__", str(part)))
def test_what_is_broken_is_named_by_its_number(number: int, harm: Callable[[Grown], None]) -> None:
    grown = Grown()
    harm(grown)
    with pytest.raises(AssertionError, match=f"^{number}: "):
        grown.check()


def test_each_invariant_is_broken_here() -> None:
    assert {number for number, _ in BROKEN} == set(range(1, 10))


def test_hashes_known_below_a_gap_only_are_none_the_worse() -> None:
    grown = Grown()
    grown.nodes[1].digests = b""
    grown.nodes[2].digests = grown.nodes[2].digests[:32]
    grown.check()
