"""Keys: zero-copy views, namespaces, bigrams, extras; and page hashes against published vectors."""

from __future__ import annotations

import hashlib
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiradix.tree import PageRows, RadixKey, RadixTree, Tier, hash_pages, namespace_seed
from hiradix.tree.key import FEW_TOKENS, FIRST_WINDOW, WINDOW_TOKENS, Namespace, packed

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def insert(tree: RadixTree, key: RadixKey, first: int = 100, tier: Tier = DEVICE):
    """Insert `key` with pages first, first + 1, ...; gives the lock back and returns the node."""
    done = tree.insert(key, tier, [np.arange(first, first + key.num_pages(tree.page_size))])
    tree.unlock(done.lock)
    return done.lock.node


def depth(tree: RadixTree, key: RadixKey) -> int:
    node = tree.match(key).device_node
    tree.check([])
    return node.end


# -- buffers ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["list", "array", "int64", "int32", "tensor"])
def test_tokens_are_equal_from_every_kind_of_buffer(kind: str) -> None:
    values = [5, 6, 7, 2**31 - 1]
    if kind == "tensor":
        torch = pytest.importorskip("torch")
        source = torch.tensor(values)
    else:
        source = {
            "list": values,
            "array": array("q", values),
            "int64": np.array(values),
            "int32": np.array(values, np.int32),
        }[kind]
    key = RadixKey(source)
    assert key.tokens.dtype == np.int64 and key.tokens.tolist() == values
    tree = RadixTree(2)
    insert(tree, RadixKey(values))
    assert depth(tree, key) == 2


@given(
    st.lists(st.sampled_from([0, 1, 5, 2**31 - 1, 2**31, 2**32, -1, -(2**40), 2**62]), max_size=40),
    st.sampled_from([0, FEW_TOKENS - 30, FEW_TOKENS]),
    st.data(),
)
def test_an_array_is_packed_as_numpy_packs_it(some: list[int], zeros: int, data: st.DataObject) -> None:
    values = [0] * zeros + some
    start = data.draw(st.integers(0, len(values)))
    end = data.draw(st.integers(start, len(values)))
    assert RadixKey(array("q", values)).packed(start, end) == packed(np.array(values, np.int64), start, end)


@pytest.mark.parametrize("token", [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -1, -(2**31), -(2**63)])
@pytest.mark.parametrize("num_more", [0, FEW_TOKENS - 4, FEW_TOKENS])
def test_one_token_in_an_array_that_may_be_wide(token: int, num_more: int) -> None:
    values = [1, 2, token, 3, *range(num_more)]
    run, width = RadixKey(array("q", values)).packed(1, len(values))
    assert width == (4 if 0 <= token < 2**31 else 8)
    assert np.frombuffer(run, np.int32 if width == 4 else np.int64).tolist() == values[1:]


@pytest.mark.parametrize("is_bigram", [False, True])
def test_the_first_tokens_of_a_buffer_that_grows(is_bigram: bool) -> None:
    """As an engine's array of a running request does: the key stays what it was, the array may grow."""
    space = Namespace("adapter", "salt", is_bigram)
    tokens = array("q", range(10))
    for source in (tokens, np.array(tokens)):
        key = RadixKey.first(source, 7, space)
        assert (len(key), key.space, key.num_tokens) == (7 - is_bigram, space, 7)
        assert key.packed(4, 7) == packed(np.arange(10), 4, 7)
        assert len(RadixKey.first(source, 99, space)) == 10 - is_bigram
    key = RadixKey.first(tokens, 8, space)
    tree = RadixTree(2)
    insert(tree, key)
    tokens.extend([0] * 100)
    assert depth(tree, key) == (8 - is_bigram) // 2
    assert key.tokens.tolist() == list(range(8)) and len(key[:5]) == 5
    same = RadixKey(list(range(8)), "adapter", is_bigram, cache_salt="salt")
    assert depth(tree, same) == depth(tree, key)


@pytest.mark.parametrize("is_bigram", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 5, 6, 40, 99])
def test_a_key_is_resumed_when_its_array_has_grown(is_bigram: bool, num_tokens: int) -> None:
    space = Namespace("adapter", "salt", is_bigram)
    tokens = array("q", range(8))
    tree = RadixTree(2)
    insert(tree, RadixKey([0, 1, 2, 3, 99, 99, 99, 99], "adapter", is_bigram, cache_salt="salt"))
    key = RadixKey.first(tokens, 7, space)
    assert depth(tree, key) == 2 - is_bigram and len(key.tokens) == 7
    tokens.extend(range(8, 40))
    assert key.resume(tokens, num_tokens, space)
    fresh = RadixKey.first(array("q", range(40)), num_tokens, space)
    assert (len(key), key.num_tokens) == (len(fresh), fresh.num_tokens)
    assert key.tokens.tolist() == fresh.tokens.tolist()
    assert key.packed(0, key.num_tokens) == fresh.packed(0, fresh.num_tokens)
    insert(tree, fresh.page_aligned(2), 200)
    assert depth(tree, key) == len(fresh) // 2


def test_a_key_of_another_array_or_namespace_is_not_resumed() -> None:
    tokens, space = array("q", range(8)), Namespace("adapter")
    key = RadixKey.first(tokens, 5, space)
    for other, theirs in ((array("q", range(8)), space), (tokens, Namespace()), (tokens, Namespace("other"))):
        assert not key.resume(other, 8, theirs)
        assert (key.num_tokens, key.space) == (5, space)


@pytest.mark.parametrize("kind", ["array", "int64", "tensor"])
def test_an_int64_buffer_is_viewed_not_copied(kind: str) -> None:
    if kind == "tensor":
        source = pytest.importorskip("torch").arange(64)
    else:
        source = array("q", range(64)) if kind == "array" else np.arange(64)
    key = RadixKey(source)
    assert np.shares_memory(key.tokens, np.asarray(source))
    for part in (key[:32], key.bigrams(), key.page_aligned(5)):
        assert np.shares_memory(part.tokens, key.tokens)


def test_not_integers_or_not_flat_is_refused() -> None:
    with pytest.raises(TypeError, match="float"):
        RadixKey([1.5])
    with pytest.raises(TypeError, match="one-dimensional"):
        RadixKey([[1, 2]])


def test_a_node_keeps_no_request_buffer_alive() -> None:
    tree = RadixTree(4)
    tokens, pages = np.arange(4000), np.arange(1000, dtype=np.int32)
    lock = tree.insert(RadixKey(tokens), DEVICE, [pages]).lock
    tree.unlock(lock)
    node = lock.node
    assert not np.shares_memory(node.tokens, tokens) and not np.shares_memory(node.device.pages, pages)
    tokens[:], pages[:] = 0, 0
    assert depth(tree, RadixKey(np.arange(4000))) == 1000
    assert tree.pages(node, DEVICE).tolist() == list(range(1000))


@pytest.mark.parametrize("is_kept", [True, False])
def test_page_ids_that_nobody_can_write_are_kept_as_they_are(is_kept: bool) -> None:
    """Of a part of more bytes, or where several nodes take parts, each node has its own."""
    tree = RadixTree(4)
    pages = np.frombuffer(np.arange(6 if is_kept else 7, dtype=np.int32).tobytes(), np.int32, 6)
    tree.unlock(tree.insert(RadixKey(range(12)), HOST, [np.array([11, 12, 13], np.int32)]).lock)
    whole = tree.insert(RadixKey(range(100, 124)), DEVICE, [pages]).lock.node
    assert (whole.device.pages is pages) == is_kept
    others = np.frombuffer(np.arange(20, 26, dtype=np.int32).tobytes(), np.int32)
    parted = tree.insert(RadixKey(range(24)), DEVICE, [others]).lock.node
    upper = parted.parent
    assert upper.device.pages.tolist() + parted.device.pages.tolist() == others.tolist()
    assert not np.shares_memory(upper.device.pages, others)
    assert not np.shares_memory(parted.device.pages, others)


@pytest.mark.parametrize("kind", ["others may write", "no int32"])
def test_page_ids_over_other_memory_are_copied(kind: str) -> None:
    ids = np.arange(6, dtype=np.int32)
    pages = np.frombuffer(bytearray(ids), np.int32) if kind == "others may write" else ids.astype(">i4")
    if kind == "no int32":
        pages = np.frombuffer(pages.tobytes(), ">i4")
    tree = RadixTree(4)
    node = tree.insert(RadixKey(range(24)), DEVICE, [pages]).lock.node
    assert node.device.pages.dtype == np.int32 and node.device.pages.tolist() == ids.tolist()
    assert not np.shares_memory(node.device.pages, pages)


@pytest.mark.parametrize("extra", ["an image", 7, bytearray(b"an image")])
def test_page_extras_are_bytes_as_they_are_hashed(extra: object) -> None:
    """Others were found in both tiers, and no worker could name their pages to storage."""
    with pytest.raises(TypeError, match="bytes"):
        RadixKey(range(8), page_extras=[None, extra])  # type: ignore[list-item]


# -- parts ------------------------------------------------------------------------------


def test_lengths_slices_and_whole_pages() -> None:
    key = RadixKey(range(10), "lora", cache_salt="tenant")
    assert len(key) == 10 and key.num_pages(4) == 2
    head = key[:7]
    assert (head.extra_key, head.cache_salt, len(head)) == ("lora", "tenant", 7)
    assert len(key.page_aligned(4)) == 8 and key.page_aligned(5) is key
    assert key.head(1, 4).tokens.tolist() == [0, 1, 2, 3]
    assert len(key[:0]) == 0 and len(RadixKey([])) == 0


def test_bigrams_are_a_view_that_is_one_shorter() -> None:
    key = RadixKey([1, 2, 3, 4, 5], "lora").bigrams()
    assert len(key) == 4 and key.is_bigram and key.extra_key == "lora"
    assert key[:2].tokens.tolist() == [1, 2, 3] and len(key[:2]) == 2
    assert len(RadixKey([1], is_bigram=True)) == 0


def test_a_bigram_page_needs_the_token_behind_it() -> None:
    tree = RadixTree(2)
    insert(tree, RadixKey([1, 2, 3, 4, 5], is_bigram=True))
    assert depth(tree, RadixKey([1, 2, 3, 4, 5], is_bigram=True)) == 2
    assert depth(tree, RadixKey([1, 2, 3, 4, 6], is_bigram=True)) == 1
    assert depth(tree, RadixKey([1, 2, 4, 4, 5], is_bigram=True)) == 0
    assert depth(tree, RadixKey([1, 2, 3, 4, 5])) == 0, "bigrams and tokens are different rows"


# -- namespaces and extras: promise 4 ---------------------------------------------------------


def test_no_hit_crosses_a_namespace() -> None:
    tree = RadixTree(1)
    spaces = [(None, None), ("a", None), (None, "a"), ("b", None), ("a", "a"), ("", None), (None, "")]
    for number, (extra_key, salt) in enumerate(spaces):
        key = RadixKey([1, 2, 3], extra_key, cache_salt=salt)
        assert depth(tree, key) == 0
        insert(tree, key, 10 * number)
    for number, (extra_key, salt) in enumerate(spaces):
        node = tree.match(RadixKey([1, 2, 9], extra_key, cache_salt=salt)).device_node
        assert tree.pages(node, DEVICE).tolist() == [10 * number, 10 * number + 1]
        assert tree.path_key(node).extra_key == extra_key and tree.path_key(node).cache_salt == salt
    seeds = [namespace_seed(*space) for space in spaces]
    assert len(set(seeds)) == len(seeds)
    tree.check([])


@pytest.mark.parametrize("tier", list(Tier))
def test_two_images_behind_equal_placeholders_never_share_a_page(tier: Tier) -> None:
    tree = RadixTree(2)
    tokens = [1, 1, 0, 0, 0, 0, 7, 7]
    cat = RadixKey(tokens, page_extras=[None, b"cat", b"cat", None])
    dog = RadixKey(tokens, page_extras=[None, b"cat", b"dog", None])
    insert(tree, cat, 10, tier)
    assert tree.match(cat).loadable_node.end == 4
    assert tree.match(dog).loadable_node.end == 2
    assert tree.match(RadixKey(tokens)).loadable_node.end == 1
    insert(tree, dog, 20, tier)
    insert(tree, RadixKey(tokens), 30, tier)
    for key, first in ((cat, 10), (dog, 20), (RadixKey(tokens), 30)):
        node = tree.match(key).loadable_node
        assert node.end == 4 and tree.pages(node, tier)[-1] == first + 3
        assert hash_pages(tree.page_rows(node, 0)) == hash_pages(tree.rows(key, tree.root, 0, 4))
    tree.check([])
    last = {hash_pages(tree.rows(key, tree.root, 0, 4))[-1] for key in (cat, dog, RadixKey(tokens))}
    assert len(last) == 3, "different images, different storage keys"


def test_extras_shorter_than_the_key_mean_none() -> None:
    tree = RadixTree(1)
    insert(tree, RadixKey([1, 2, 3], page_extras=[b"x"]))
    assert depth(tree, RadixKey([1, 2, 3], page_extras=[b"x", None, None])) == 3
    assert depth(tree, RadixKey([1, 2, 3], page_extras=[b"x", b"y"])) == 1


def test_tokens_that_do_not_fit_32_bits_do_not_match_their_low_halves() -> None:
    tree = RadixTree(2)
    wide = RadixKey([1, 2, 3 + 2**32, 4, 5, 6])
    insert(tree, wide)
    assert depth(tree, wide) == 3
    assert depth(tree, RadixKey([1, 2, 3, 4, 5, 6])) == 1
    assert depth(tree, RadixKey([1, 2, 3 + 2**32, 4, 5, 7])) == 2
    assert depth(tree, RadixKey([1, 2, 3 - 2**32, 4])) == 1
    narrow = RadixKey([1, 2, 3, 4, 2**33, 6])
    insert(tree, narrow, 200)
    assert depth(tree, RadixKey([1, 2, 3, 4])) == 2
    assert depth(tree, narrow) == 3 and depth(tree, wide) == 3


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=6), st.sampled_from([1, 2]))
def test_any_token_finds_itself(tokens: list[int], page_size: int) -> None:
    tree = RadixTree(page_size)
    key = RadixKey(tokens * 2)
    insert(tree, key)
    assert depth(tree, key) == key.num_pages(page_size)
    found = tree.path_key(tree.match(key).device_node).tokens.tolist()
    assert found == key.page_aligned(page_size).tokens.tolist()


def test_a_long_run_is_compared_whole() -> None:
    tokens = np.arange(100_000) % 50_000
    tree = RadixTree(16)
    insert(tree, RadixKey(tokens))
    assert depth(tree, RadixKey(tokens.copy())) == 6250
    for at in (15, 16, 20_000, 99_999):
        other = tokens.copy()
        other[at] += 1
        assert tree.match(RadixKey(other)).device_node.end == at // 16
    tree.check([])


# -- hashes -----------------------------------------------------------------------------------

VECTOR_1 = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"
VECTOR_2 = "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6"
SEED = "d13976d7b0b5b60f1cbc0f855ef7ec6508f443565049355270b55bbffeeeed33"


def digests(tokens: list[list[int]], prior: bytes = b"", **more: object) -> list[str]:
    return [d.hex() for d in hash_pages(PageRows(prior, np.array(tokens, np.int64), **more))]  # type: ignore[arg-type]


def test_chain_matches_the_published_vectors() -> None:
    assert digests([[1, 2, 3, 4], [5, 6, 7, 8]]) == [VECTOR_1, VECTOR_2]
    assert digests([[5, 6, 7, 8]], bytes.fromhex(VECTOR_1)) == [VECTOR_2], "goes on from a prior"


def test_bigrams_hash_both_members() -> None:
    want = "ede8ef26a097f0fd889f9f39f6f5af921370630b164c4a4fa28eb716b2df9269"
    assert digests([[1, 2, 3]], is_bigram=True) == [want]


def test_namespace_seeds_and_the_chain_under_one() -> None:
    assert namespace_seed(None, None) == b"" and namespace_seed("tenantA", None).hex() == SEED
    want = "db64201913c44015e033ddb4fee172b3e10a92a087bb8dfa3556f8059222766f"
    assert digests([[1, 2, 3, 4]], bytes.fromhex(SEED)) == [want]


def test_wide_tokens() -> None:
    want = "ac87df80458ef6e63ab6d805c9a37d80084a20e4a53d60c5edf9e4ec21d1d3ab"
    assert digests([[2**33, 1]]) == [want]
    assert digests([[2**32 - 1, 1]]) == [hashlib.sha256(b"\xff\xff\xff\xff\x01\x00\x00\x00").hexdigest()]


def test_tree_rows_give_the_vectors() -> None:
    tree = RadixTree(4)
    node = insert(tree, RadixKey(range(1, 9)))
    assert [d.hex() for d in hash_pages(tree.page_rows(node, 0))] == [VECTOR_1, VECTOR_2]
    plain, salted = RadixKey(range(1, 9)), RadixKey(range(1, 9), "tenantA")
    assert hash_pages(tree.rows(salted, tree.root, 0, 2)) != hash_pages(tree.rows(plain, tree.root, 0, 2))
    assert tree.rows(salted, tree.root, 0, 2).prior.hex() == SEED


def test_rows_are_copies() -> None:
    tree, tokens = RadixTree(2), np.arange(8)
    node = insert(tree, RadixKey(tokens))
    from_tree, from_key = tree.page_rows(node, 1), tree.rows(RadixKey(tokens), tree.root, 0, 4)
    assert from_tree.rows.flags.owndata and not np.shares_memory(from_key.rows, tokens)


def test_an_empty_span_has_no_rows_but_a_prior() -> None:
    tree = RadixTree(4)
    node = insert(tree, RadixKey(range(1, 9)))
    tree.set_hashes(node, 0, hash_pages(tree.page_rows(node, 0)))
    rows = tree.page_rows(node, node.end)
    assert len(rows.rows) == 0 and rows.start == 2 and rows.prior.hex() == VECTOR_2 and hash_pages(rows) == []


def test_known_hashes_survive_a_split_and_extend() -> None:
    tree = RadixTree(1)
    node = insert(tree, RadixKey(range(8)))
    chain = hash_pages(tree.page_rows(node, 0))
    tree.set_hashes(node, 0, chain)
    upper = tree.match(RadixKey([0, 1, 2, 9])).device_node
    assert tree.hashes(upper) == chain[:3] and tree.hashes(node) == chain[3:]
    longer = insert(tree, RadixKey(range(12)), 100)
    rows = tree.page_rows(longer, longer.start)
    assert rows.start == 8 and rows.prior == chain[-1], "the chain goes on, nothing is hashed twice"
    assert tree.hashes(longer) is None
    tree.set_hashes(longer, rows.start, hash_pages(rows))
    fresh = RadixTree(1)
    full = hash_pages(fresh.rows(RadixKey(range(12)), fresh.root, 0, 12))
    assert tree.hashes(longer) == full[8:]


# -- packing ----------------------------------------------------------------------------

EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**63 - 1, -1, -(2**31), -(2**63)]


@given(
    st.sampled_from([1, 2, 255, 256, 257, 5000]),
    st.lists(st.tuples(st.floats(0, 0.999), st.sampled_from(EDGES)), max_size=3),
    st.integers(1, 2),
)
def test_packed_tokens_are_narrow_if_all_fit_and_never_cut(
    length: int, odd_ones: list[tuple[float, int]], step: int
) -> None:
    tokens = np.arange(length * step, dtype=np.int64)[::step]
    for place, value in odd_ones:
        tokens[int(place * length)] = value
    run, width = packed(tokens, 0, length)
    fits = all(0 <= token < 2**31 for token in tokens.tolist())
    assert width == (4 if fits else 8)
    assert np.frombuffer(run, np.int32 if fits else np.int64).tolist() == tokens.tolist()


def test_a_long_key_is_packed_in_windows_and_matched_over_their_ends() -> None:
    tree, tokens = RadixTree(4), np.arange(3 * WINDOW_TOKENS)
    tree.unlock(tree.insert(RadixKey(tokens), Tier.DEVICE, [np.arange(len(tokens) // 4)]).lock)
    for end in range(len(tokens) - 1000, 0, -1000):
        tree.match(RadixKey(tokens[:end]))
    whole = RadixKey(tokens)
    assert tree.match(whole).device_node.end == len(tokens) // 4
    assert whole.run_end - whole.run_start <= WINDOW_TOKENS, "all of it was packed"
    for at in (FIRST_WINDOW - 1, FIRST_WINDOW, FIRST_WINDOW + WINDOW_TOKENS, len(tokens) - 1):
        changed = tokens.copy()
        changed[at] += 2**32
        assert tree.match(RadixKey(changed)).device_node.end == at // 4
