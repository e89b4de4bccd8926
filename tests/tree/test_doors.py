"""What enters the tree: namespaces are text, counts are whole and not negative, pages are ids."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from hiradix.errors import BadNamespace, Misuse
from hiradix.tree import Namespace, RadixKey, RadixTree, Tier, TokenLog, ids
from hiradix.tree.key import namespace, private

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


@pytest.mark.parametrize("pages", [[-1], [3, -7], [2**31], [-(2**40)], [*range(100), -1]], ids=str)
def test_what_is_no_page_id_is_refused_and_changes_nothing(pages: list[int]) -> None:
    tree = RadixTree(1)
    before = tree.render()
    with pytest.raises(AssertionError, match="no page id"):
        tree.insert(RadixKey(range(len(pages))), DEVICE, [np.array(pages)])
    assert tree.render() == before
    tree.check([])


def test_a_page_under_two_prefixes_is_found() -> None:
    tree = RadixTree(2)
    for tokens in ([5, 6], [7, 8]):
        tree.unlock(tree.insert(RadixKey(tokens), DEVICE, [np.array([7])]).lock)
    with pytest.raises(Misuse, match=r"10: DEVICE component 0 has pages twice: \[7\]"):
        tree.check([])


def test_both_forms_of_require_agree() -> None:
    ids.require(np.empty(0, np.int32))
    ids.require(np.arange(100))
