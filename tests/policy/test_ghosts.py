"""Names of paths, and the notes of what has left, against lists."""

from __future__ import annotations

import math
from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.policy.ghosts import EMPTY, NAME_BYTES, BlockNames, Ghosts, extend
from hiradix.tree import RadixKey

PAGE, PAGES_PER_BLOCK = 2, 3
BLOCK = PAGE * PAGES_PER_BLOCK


def name_of(number: int) -> bytes:
    return number.to_bytes(NAME_BYTES, "little")


def assert_names(blocks: BlockNames, names: list[bytes]) -> None:
    count = len(names)
    assert blocks.num_blocks == count
    assert blocks.names(0, count + 3) == names
    assert blocks.last == (names[-1] if names else b"")
    for first in {0, 1, count // 2, count}:
        assert blocks.names(first, count - 1) == names[first : max(count - 1, 0)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 200)), max_size=12))
def test_a_trail_is_the_list_of_its_names(moves: list[tuple[bool, int]]) -> None:
    """Cut anywhere, on the border of two of its pieces too, and continued from there."""
    blocks, names, number = EMPTY, [], 0
    for is_cut, count in moves:
        if is_cut:
            blocks, names = blocks.head(count), names[:count]
        else:
            new = [name_of(number + i) for i in range(count)]
            number += count
            blocks, names = blocks.joined(b"".join(new)), names + new
        assert_names(blocks, names)


def test_heads_that_end_with_a_piece() -> None:
    names = [name_of(i) for i in range(300)]
    blocks = EMPTY
    for part in (names[:200], names[200:264], names[264:]):
        blocks = blocks.joined(b"".join(part))
    for count in range(300, -1, -1):
        assert_names(blocks.head(count), names[:count])


def test_a_trail_of_one_block_after_the_other_has_few_pieces() -> None:
    blocks = EMPTY
    for number in range(4096):
        blocks = blocks.joined(name_of(number))
        assert len(blocks._pieces) <= 2 + math.log2(number + 2)
    assert_names(blocks, [name_of(i) for i in range(4096)])


def extended(tokens: list[int], *ends: int, blocks: BlockNames = EMPTY, **space: object) -> BlockNames:
    key = RadixKey(tokens, **space)  # type: ignore[arg-type]
    for end in ends:
        blocks = extend(blocks, key, end, PAGE, PAGES_PER_BLOCK)
    return blocks


def test_names_stand_for_all_tokens_up_to_them_and_for_nothing_else() -> None:
    tokens = list(range(5 * BLOCK))
    whole = extended(tokens, 5).names(0, 5)
    assert len(set(whole)) == 5 and extended(tokens, 1, 2, 4, 4, 3, 5).names(0, 5) == whole
    assert extended(tokens[: 3 * BLOCK], 3).names(0, 3) == whole[:3]
    assert extended(tokens, 5, blocks=extended(tokens, 5).head(2)).names(0, 5) == whole
    for at in (0, BLOCK - 1, 2 * BLOCK, 5 * BLOCK - 1):
        other = extended([*tokens[:at], 77777, *tokens[at + 1 :]], 5).names(0, 5)
        same = [a == b for a, b in zip(whole, other)]
        assert same == [block < at // BLOCK for block in range(5)]


def test_namespaces_images_and_bigrams_have_names_of_their_own() -> None:
    tokens = list(range(3 * BLOCK + 1))
    pages = 3 * PAGES_PER_BLOCK
    found = [
        extended(tokens, 3, **space).names(0, 3)
        for space in (
            {}, {"extra_key": "a"}, {"cache_salt": "a"}, {"is_bigram": True},
            {"page_extras": [b"x"] + [None] * (pages - 1)}, {"page_extras": [b"y"] + [None] * (pages - 1)},
        )
    ]  # fmt: skip
    assert len({name for names in found for name in names}) == 3 * len(found)
    for page in range(pages):
        images: list[list[bytes | None]] = [[None] * pages, [None] * pages]
        images[0][page], images[1][page], images[0][-1] = b"x", b"y", images[0][-1] or b"z"
        images[1][-1] = images[1][-1] or b"z"
        one, other = (extended(tokens, 3, page_extras=extras).names(0, 3) for extras in images)
        same = [a == b for a, b in zip(one, other)]
        assert same == [block < page // PAGES_PER_BLOCK for block in range(3)]


def test_a_bigrams_second_token_counts_for_its_block() -> None:
    tokens = list(range(2 * BLOCK + 1))
    one = extended(tokens, 2, is_bigram=True).names(0, 2)
    other = extended([*tokens[:BLOCK], 777, *tokens[BLOCK + 1 :]], 2, is_bigram=True).names(0, 2)
    last = extended([*tokens[:-1], 777], 2, is_bigram=True).names(0, 2)
    assert one[0] != other[0] and one[0] == last[0] and one[1] != last[1]


def test_ghosts_are_forgotten_in_the_order_they_left_and_one_at_a_time() -> None:
    ghosts: Ghosts[int] = Ghosts(2)
    assert [ghosts.add(name_of(i), i) for i in (1, 2)] == [None, None]
    assert ghosts.add(name_of(1), 10) is None and len(ghosts) == 2, "it is known already, and left last now"
    assert ghosts.add(name_of(3), 3) == 2 and len(ghosts) == 2
    assert ghosts.pop(name_of(2)) is None and ghosts.pop(name_of(1)) == 10 and ghosts.pop(name_of(1)) is None
    assert len(ghosts) == 1 and ghosts.add(name_of(4), 4) is None
    ghosts.clear()
    assert len(ghosts) == 0 and ghosts.pop(name_of(3)) is None


def test_what_left_first_is_found_at_once_however_much_has_gone_before_it() -> None:
    """Found: 75 us for each block that was evicted with 262,144 ghosts, as a dict looks for its first behind
    all that have gone. No test measures that: the type stands for it."""
    ghosts: Ghosts[int] = Ghosts(1000)
    for number in range(5000):
        lost = ghosts.add(name_of(number), number)
        assert lost == (number - 1000 if number >= 1000 else None) and len(ghosts) <= 1000
    assert ghosts.pop(name_of(4000)) == 4000 and ghosts.pop(name_of(4000)) is None
    assert ghosts.add(name_of(4500), 1) is None and ghosts.add(name_of(1), 2) is None
    assert ghosts.add(name_of(2), 3) == 4001
    assert type(ghosts._notes) is OrderedDict, "whose first entry is known"
