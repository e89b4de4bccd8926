"""Keys that remember where they were found give the same answers as keys that do not, and cost less."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from hiradix.tree import Granularity, Node, RadixKey, RadixTree, Tier, TokenLog
from tests.seeds import is_enough, seeded, seeds

DEVICE, HOST = Tier.DEVICE, Tier.HOST


class Talk:
    """A conversation: its log, and the same tokens kept apart."""

    def __init__(self, tokens: list[int], salt: str | None, is_bigram: bool):
        self.log = TokenLog(tokens, None, is_bigram, cache_salt=salt)
        self.tokens, self.salt, self.is_bigram = list(tokens), salt, is_bigram
        self.kept = self.plain(len(tokens))  # a key of no log, looked up again and again

    def plain(self, num_tokens: int) -> RadixKey:
        return RadixKey(self.tokens[:num_tokens], None, self.is_bigram, cache_salt=self.salt)


PAGES = itertools.count()


def boundaries(tree: RadixTree, key: RadixKey) -> tuple[Node, Node]:
    match = tree.match(key)
    return match.device_node, match.loadable_node


def turn(tree: RadixTree, talk: Talk, rng: random.Random, locks: list) -> None:
    """Match, lock, insert; some locks stay for a while."""
    key = talk.log.key(rng.randint(0, len(talk.log)))
    node = tree.match(key).device_node
    lock = tree.lock(node, DEVICE)
    num_new = len(key) // tree.page_size - node.end
    first = next(PAGES) * 10_000
    at = lock if rng.random() < 0.5 else None
    done = tree.insert(key, DEVICE, [np.arange(first, first + num_new)], at)
    tree.unlock(lock)
    locks.append(done.lock)
    while locks and rng.random() < 0.6:
        tree.unlock(locks.pop(rng.randrange(len(locks))))


def live(seed: int) -> int:
    """A random life of two trees that share logs; the number of bookmarks that were of use."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    eager = [Granularity(long_path=rng.choice([0, 2]), waste=1) for _ in range(2)]
    trees = [RadixTree(size, granularity=one) for one in eager]
    talks = [Talk([rng.randint(0, 1)], rng.choice([None, "a"]), seed % 2 == 1) for _ in range(4)]
    locks: list[list] = [[], []]
    num_used = 0
    for _ in range(120):
        which = int(rng.random() < 0.15)
        tree, talk = trees[which], rng.choice(talks)
        move = rng.random()
        if move < 0.35:
            new = [rng.randint(0, 1) for _ in range(rng.randint(1, 12))]
            talk.log.extend(new)
            talk.tokens += new
        elif move < 0.75:
            turn(tree, talk, rng, locks[which])
        elif move < 0.97:
            tree.evict(0, DEVICE, rng.randint(1, 8))
        else:
            tree.clear()
            locks[which].clear()
        asked = rng.randint(0, len(talk.log))
        marked = talk.log.key(asked)
        found, wanted = boundaries(tree, marked), boundaries(tree, talk.plain(asked))
        assert found == wanted, f"seed {seed}: {found} with a bookmark, {wanted} without"
        kept, fresh = talk.kept, talk.plain(len(talk.kept.tokens))
        assert boundaries(tree, kept) == boundaries(tree, fresh), (
            f"seed {seed}: a key finds something else a second time"
        )
        if rng.random() < 0.2:
            talk.kept = talk.plain(asked)
        num_used += marked.run_start > 0
    for tree, out in zip(trees, locks, strict=True):
        tree.check(out)
    return num_used


@seeded
@pytest.mark.parametrize("chunk", range(4))
def test_a_bookmark_changes_no_answer(chunk: int) -> None:
    num_used = sum(live(seed) for seed in seeds(100, chunk, 4))
    assert is_enough(num_used > 200), "hardly any bookmark was of use"


def test_the_next_turn_looks_at_new_tokens_only() -> None:
    tree, log = RadixTree(4), TokenLog(range(40_000))
    lock = tree.insert(log.key(), DEVICE, [np.arange(10_000)]).lock
    log.extend(range(64))
    key = log.key()
    assert tree.match(key).device_node is lock.node
    assert key.run_start == 40_000, "tokens before the bookmark were packed to be compared"


def test_keys_given_out_do_not_change_and_cannot_be_changed() -> None:
    log = TokenLog([1, 2, 3])
    first = log.key()
    log.extend([4] * 100)
    assert first.tokens.tolist() == [1, 2, 3] and len(log.key(5)) == 5
    with pytest.raises(ValueError, match="read-only"):
        first.tokens[0] = 9


def test_only_a_head_of_the_key_keeps_the_bookmark() -> None:
    log = TokenLog(range(20))
    key = log.key()
    assert key[:8].bookmark is key.bookmark and key.page_aligned(8).bookmark is key.bookmark
    for other in (key[4:8], key.bigrams(), RadixKey(key.tokens)):
        assert other.bookmark is not key.bookmark and other.bookmark.node is None


def test_a_bookmark_in_one_tree_leads_nowhere_in_another() -> None:
    log = TokenLog(range(16))
    one, other = RadixTree(1), RadixTree(1)
    one.unlock(one.insert(log.key(), DEVICE, [np.arange(16)]).lock)
    assert other.match(log.key()).device_node is other.root
    assert one.match(log.key()).device_node.end == 16
    one.clear()
    assert one.match(log.key()).device_node is one.root
