"""The named differences from SGLang 0.5.9, each pinned on both sides. The reasons: docs/differences.md.

The numbers in the tests' names are those of the document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.differential import ours
from tests.differential.compare import Seen, play_on_peer
from tests.differential.moves import Move
from tests.differential.ours import AS_SHIPPED, Manner
from tests.differential.sides import stamps
from tests.differential.streams import WHOLE, Setup, Stream

A, B, C, D = (list(range(first, first + 40)) for first in (100, 200, 300, 400))
NAMES = {f"{s:x}": name for name, run in zip("ABCD", (A, B, C, D)) for s in stamps(None, run)}


def insert(tokens: list[int]) -> Move:
    return ["insert", None, tokens]


def look(tokens: list[int]) -> Move:
    return ["look", None, tokens]


def evict(num_tokens: int) -> Move:
    return ["evict", num_tokens]


CASES: dict[str, tuple[Setup, list[Move]]] = {
    "rest": (
        Setup(1, 30),
        [insert(A[:8]), insert(C[:3]), insert([*A[:4], *B[:2]]), evict(1)],
    ),
    "match alone": (Setup(1, 30), [insert(A[:4]), insert(B[:3]), ["peek", None, A[:4]], evict(1)]),
    "part of a node": (Setup(1, 64), [insert(A[:32]), evict(1), look(A[:32])]),
    "small load": (
        Setup(4, 30, 4.0, load_back_minimum=True),
        [insert(A[:8]), evict(8), ["start", "r", None, A[:9], WHOLE]],
    ),
    "room": (
        Setup(1, 20, 8.0),
        [insert(A[:12]), evict(12), insert(B[:4]), insert(C[:3]), insert(D[:3]), ["load", None, A[:12]]],
    ),
    "chunk": (Setup(1, 20, 4.0), [["start", "r", None, A[:8], 4]]),
    "one request": (
        Setup(1, 20, 4.0, "write_through_selective"),
        [["start", "r", None, A[:5], WHOLE], ["finish", "r", True]],
    ),
    "mirrors": (
        Setup(1, 8, 1.5, host_taken=8),
        [insert(A[:4]), insert(B[:4]), evict(8), look(B[:4])],
    ),
    "full host": (Setup(1, 8, 1.5, "write_back", host_taken=12), [insert(A[:4]), evict(1), look(A[:4])]),
    "orphan": (
        Setup(1, 12, 1.5, host_taken=16),
        [insert(A[:4]), insert(A[:6]), evict(1), evict(4), look(A[:6])],
    ),
    "write back": (
        Setup(1, 20, 8.0, "write_back"),
        [insert(A[:1]), insert(A[:2]), insert(B[:3]), evict(1), evict(1)],
    ),
    "host order": (
        Setup(1, 8, 1.5, host_taken=1),
        [insert(A[:4]), insert(B[:4]), look(A[:4]), evict(8), insert(C[:4])],
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What one side showed in one case."""

    seen: Seen

    def answer(self, move: int) -> Any:
        return self.seen[move].get("answer", self.seen[move].get("error"))

    def left(self, move: int) -> set[str]:
        """Which prompts lost pages from the device."""
        return {NAMES[page] for page, tiers in self.seen[move]["pages"].items() if "D" not in tiers}

    def on_host(self) -> set[str]:
        """Which prompts have pages on the host in the end."""
        tiers: dict[str, str] = {}
        for step in self.seen:
            tiers.update(step["pages"])
        return {NAMES[page] for page, where in tiers.items() if "H" in where}

    def host_free(self, move: int = -1) -> int:
        return int(self.seen[move]["free"][1])


@pytest.fixture(scope="module")
def theirs() -> dict[str, Outcome]:
    streams = [Stream(name, setup, moves) for name, (setup, moves) in CASES.items()]
    return {stream.name: Outcome(seen) for stream, seen in zip(streams, play_on_peer(streams))}


def play(name: str, manner: Manner = AS_SHIPPED) -> Outcome:
    setup, moves = CASES[name]
    return Outcome(ours.run(Stream(name, setup, moves), manner))


def test_1_the_rest_of_a_node_that_was_not_asked_for_stays_cold(theirs: dict[str, Outcome]) -> None:
    assert theirs["rest"].left(3) == {"C"}
    assert play("rest").left(3) == {"A"}
    assert play("rest", Manner(touch_rest=True)).left(3) == {"C"}


def test_2_a_match_that_nobody_locks_is_no_use(theirs: dict[str, Outcome]) -> None:
    assert theirs["match alone"].left(3) == {"B"}
    assert play("match alone").left(3) == {"A"}


def test_3_a_big_node_leaves_in_parts(theirs: dict[str, Outcome]) -> None:
    assert theirs["part of a node"].answer(1) == 32 and theirs["part of a node"].answer(2)[0] == 0
    own = play("part of a node")
    assert 1 <= own.answer(1) <= 4 and own.answer(2)[0] == 32 - own.answer(1)


def test_4_short_host_hits_are_loaded_as_promised(theirs: dict[str, Outcome]) -> None:
    assert theirs["small load"].answer(2) == [0, 8, 0]
    assert play("small load").answer(2) == [0, 8, 8]


def test_5_room_is_made_for_what_is_missing_only(theirs: dict[str, Outcome]) -> None:
    """12 tokens to load, 10 free: they evict 12 (B, C and D), we evict 2 (from B)."""
    assert theirs["room"].answer(5) == [0, 12, 12] and theirs["room"].left(5) == {"B", "C", "D"}
    assert play("room").answer(5) == [0, 12, 12] and play("room").left(5) == {"B"}


def test_6_a_chunk_is_written_at_once_and_a_request_counts_once(theirs: dict[str, Outcome]) -> None:
    assert theirs["chunk"].on_host() == set() and play("chunk").on_host() == {"A"}
    assert theirs["one request"].on_host() == {"A"} and play("one request").on_host() == set()


def test_7_a_full_host_gives_up_copies_of_what_the_device_has(theirs: dict[str, Outcome]) -> None:
    assert theirs["mirrors"].answer(3)[:2] == [0, 0]
    assert play("mirrors").answer(3)[:2] == [0, 4]


def test_8_write_back_with_a_full_host_evicts(theirs: dict[str, Outcome]) -> None:
    assert str(theirs["full host"].answer(1)).startswith("AssertionError")
    own = play("full host")
    assert own.answer(1) > 0 and own.answer(2)[0] == 4 - own.answer(1)


def test_9_no_copy_of_what_could_not_be_reached(theirs: dict[str, Outcome]) -> None:
    """Room on the host for the child, not for its parent. Theirs stays there, for nobody to find."""
    assert theirs["orphan"].answer(4)[:2] == [0, 0] and theirs["orphan"].host_free() == 0
    own = play("orphan")
    assert own.answer(4)[:2] == [0, 0] and own.host_free() == 2


def test_writing_back_leaves_what_is_above_as_cold_as_it_was(theirs: dict[str, Outcome]) -> None:
    """A0 is older than B. Copying A1 down to evict it makes A0 no hotter."""
    assert theirs["write back"].left(4) == {"A"}
    assert play("write back", Manner(as_inserted=True)).left(4) == {"A"}


def test_the_host_keeps_what_was_used_last(theirs: dict[str, Outcome]) -> None:
    """A and B are on the host only; A was used after B, on the device. C needs room for one."""
    assert theirs["host order"].on_host() == {"A", "C"}
    assert play("host order", Manner(as_inserted=True)).on_host() == {"A", "C"}
