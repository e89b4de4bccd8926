"""Names of blocks are SGLang's: vectors computed with its own functions, and events as it joins them."""

from __future__ import annotations

import numpy as np

from hiradix.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvents, Naming
from hiradix.tree import Component, Granularity, RadixKey, RadixTree, Tier

DEVICE, HOST = Tier.DEVICE, Tier.HOST
PLAIN = [-3488128144981237669, 5674439469042975057]  # [1, 2, 3, 4], [5, 6, 7, 8]


def watched(page_size: int = 4, naming: Naming | None = None, **how) -> tuple[RadixTree, KVEvents]:
    tree = RadixTree(page_size, **how)
    return tree, KVEvents(tree, naming)


def insert(tree: RadixTree, key: RadixKey, first_page: int = 0, tier: Tier = DEVICE):
    num_pages = key.num_pages(tree.page_size)
    done = tree.insert(key, tier, [np.arange(first_page, first_page + num_pages, dtype=np.int32)])
    tree.unlock(done.lock)
    return done.lock.node


def test_a_plain_block_is_named_by_its_tokens_and_all_before() -> None:
    tree, events = watched()
    insert(tree, RadixKey(range(1, 9)))
    assert events.take() == [BlockStored(PLAIN, None, list(range(1, 9)), 4, "GPU")]
    assert events.take() == []


def test_a_block_below_names_its_parent() -> None:
    tree, events = watched()
    insert(tree, RadixKey(range(1, 5)))
    events.take()
    insert(tree, RadixKey(range(1, 9)))
    assert events.take() == [BlockStored(PLAIN[1:], PLAIN[0], [5, 6, 7, 8], 4, "GPU")]


def test_bigrams_are_pairs() -> None:
    tree, events = watched(2)
    insert(tree, RadixKey([1, 2, 3], is_bigram=True))
    (event,) = events.take()
    assert event.token_ids == [(1, 2), (2, 3)]
    assert event.block_hashes == [int.from_bytes(bytes.fromhex("ede8ef26a097f0fd"), "big", signed=True)]


def test_wide_tokens() -> None:
    tree, events = watched(2)
    insert(tree, RadixKey([1 << 33, 1]))
    (event,) = events.take()
    assert event.token_ids == [1 << 33, 1]
    assert event.block_hashes == [int.from_bytes(bytes.fromhex("ac87df80458ef6e6"), "big", signed=True)]


def test_the_default_format_tells_salts_apart_and_only_adapters_it_can_name() -> None:
    names = []
    naming = Naming(lora_name={"lora-1": "poet"}.get)
    spaces = [(None, None), ("tenant", None), (None, "salt"), ("lora-1", None), ("lora-1", "salt")]
    for extra_key, salt in spaces:
        tree, events = watched(naming=naming)
        insert(tree, RadixKey(range(1, 5), extra_key, cache_salt=salt))
        (event,) = events.take()
        assert event.cache_salt == salt and event.lora_name == naming.lora_name(extra_key)
        names.append(event.block_hashes[0])
    assert names == [
        PLAIN[0],
        PLAIN[0],
        2420881443615746796,
        8296683972698922355,
        -4653654226954285672,
    ]


def test_the_dynamo_format_tells_all_namespaces_apart() -> None:
    names = []
    for extra_key, salt in ((None, None), ("tenant", None), (None, "salt"), ("tenant", "salt")):
        tree, events = watched(naming=Naming(is_dynamo=True))
        insert(tree, RadixKey(range(1, 5), extra_key, cache_salt=salt))
        names += events.take()[0].block_hashes
    assert names == [PLAIN[0], -5218880163669576742, -5831485738128826871, 1934392081788605827]


def test_a_page_that_leaves_a_tier_is_said_to_be_in_the_other() -> None:
    """Readers that forget a removed block whatever its medium hear that it is still there."""
    tree, events = watched()
    node = insert(tree, RadixKey(range(1, 9)))
    tree.adopt(node, 0, HOST, np.array([7, 8], np.int32))
    assert events.take() == [
        BlockStored(PLAIN, None, list(range(1, 9)), 4, "GPU"),
        BlockStored(PLAIN, None, list(range(1, 9)), 4, "CPU_PINNED"),
    ]
    tree.demote(node)
    assert events.take() == [
        BlockRemoved(PLAIN, "GPU"),
        BlockStored(PLAIN, None, list(range(1, 9)), 4, "CPU_PINNED"),
    ]
    tree.evict(0, HOST, 2)
    assert events.take() == [BlockRemoved(PLAIN, "CPU_PINNED")]


def test_what_goes_down_as_several_nodes_is_one_event_root_first() -> None:
    tree, events = watched(granularity=Granularity(long_path=99))
    insert(tree, RadixKey(range(1, 5)))
    node = insert(tree, RadixKey(range(1, 9)), 10)
    events.take()
    tree.adopt(node, 0, HOST, np.array([7, 8], np.int32))
    assert events.take() == [BlockStored(PLAIN, None, list(range(1, 9)), 4, "CPU_PINNED")]


def test_removals_of_one_medium_are_one_event() -> None:
    tree, events = watched()
    insert(tree, RadixKey(range(1, 5)))
    insert(tree, RadixKey(range(11, 15)), 10)
    events.take()
    tree.evict(0, DEVICE, 2)
    (event,) = events.take()
    assert isinstance(event, BlockRemoved) and len(event.block_hashes) == 2 and event.medium == "GPU"


def test_a_cleared_tree_forgets_what_was_not_told_yet() -> None:
    tree, events = watched()
    insert(tree, RadixKey(range(1, 5)))
    tree.clear()
    assert events.take() == [AllBlocksCleared()]
    insert(tree, RadixKey(range(1, 5)))
    assert [type(event) for event in events.take()] == [BlockStored]


def test_windows_say_nothing() -> None:
    tree, events = watched(components=(Component("full"), Component("window", 1)))
    pages = np.arange(2, dtype=np.int32)
    done = tree.insert(RadixKey(range(1, 9)), DEVICE, [pages, pages[1:]])
    tree.unlock(done.lock)
    assert len(events.take()) == 1
    tree.evict(1, DEVICE, 1)
    assert events.take() == []


def test_storage_is_named_and_forgotten_with_everything_else_told_anew() -> None:
    tree, events = watched()
    node = insert(tree, RadixKey(range(1, 9)))
    events.take()
    events.backed_up(node, 1, 2)
    assert events.take() == [BlockStored(PLAIN[1:], PLAIN[0], [5, 6, 7, 8], 4, "EXTERNAL")]
    tree.forget_stored()
    assert events.take() == [AllBlocksCleared(), BlockStored(PLAIN, None, list(range(1, 9)), 4, "GPU")]
    tree.forget_stored()
    assert events.take() == [], "nothing was said to be in storage"


def test_a_tree_that_has_something_cannot_be_watched_any_more() -> None:
    tree = RadixTree(4)
    insert(tree, RadixKey(range(1, 5)))
    try:
        KVEvents(tree)
    except AssertionError as error:
        assert "from the beginning" in str(error)
    else:
        raise AssertionError("a tree was watched half")
