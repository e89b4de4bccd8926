"""What a tree does not take: it says so, and is as it was before."""

from __future__ import annotations

import numpy as np
import pytest

from hiradix.tree import Component, RadixKey, RadixTree, Tier, hash_pages

DEVICE, HOST = Tier.DEVICE, Tier.HOST
COMPONENTS = (Component("full"), Component("window", reach=2), Component("state", reach=1, per_page=False))


def ids(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize(
    "pages",
    [
        (ids(2),),  # a gap behind what the tree has, which is one page at most
        (ids(0),),
        (ids(5),),  # more than the key
        (ids(4), ids(5)),
        (ids(4), ids(4), ids(2)),
    ],
    ids=lambda pages: "-".join(str(len(own)) for own in pages),
)
def test_pages_that_do_not_fit_their_key_change_nothing(
    pages: tuple[np.ndarray, ...], tier: Tier, is_known: bool
) -> None:
    """Found: a node without data stayed behind, locked for ever, and the next check failed."""
    tree = RadixTree(1, COMPONENTS)
    if is_known:
        tree.unlock(tree.insert(RadixKey([0]), tier, [ids(1, 90)]).lock)
    before = tree.render()
    with pytest.raises(AssertionError, match="pages from|of component"):
        tree.insert(RadixKey(range(4)), tier, pages)
    assert tree.render() == before
    tree.check([])


def test_device_pages_behind_what_only_the_host_has_change_nothing() -> None:
    tree = RadixTree(1)
    tree.unlock(tree.insert(RadixKey([0, 1]), HOST, [ids(2)]).lock)
    with pytest.raises(AssertionError, match="pages from 2 to 4 behind those up to 0"):
        tree.insert(RadixKey(range(4)), DEVICE, [ids(2)])
    tree.check([])
    tree.unlock(tree.insert(RadixKey(range(4)), HOST, [ids(2, 2)]).lock)
    tree.check([])


def test_tokens_beyond_63_bits_are_no_negative_ones() -> None:
    tree = RadixTree(1)
    tree.unlock(tree.insert(RadixKey([-1, 2**63 - 1]), DEVICE, [ids(2)]).lock)
    assert tree.match(RadixKey(np.array([2**63 - 1], np.uint64))).device_node.end == 0
    for token in (2**63, 2**64 - 1):
        for form in ([token], np.array([token], np.uint64)):
            with pytest.raises(TypeError, match="63 bits"):
                RadixKey(form)
    assert len(RadixKey(np.empty(0, np.uint64))) == 0


def test_an_empty_extra_is_none() -> None:
    """Found: beside another page's extra it was one to a match, and none to the names of stored pages."""
    tree, tokens = RadixTree(1), [1, 2, 3]
    tree.unlock(tree.insert(RadixKey(tokens, page_extras=[b"", b"image"]), DEVICE, [ids(3)]).lock)
    key = RadixKey(tokens, page_extras=[None, b"image", b""])
    node = tree.match(key).device_node
    assert node.end == 3 and tree.match(RadixKey(tokens)).device_node.end == 1
    names = hash_pages(tree.page_rows(node, 0))
    assert names == hash_pages(tree.rows(RadixKey(tokens, page_extras=[b"", b"image"]), tree.root, 0, 3))
