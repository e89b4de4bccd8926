"""Whose session a prompt is of, by what it begins with."""

from __future__ import annotations

import random

from hiradix.policy import continuations
from hiradix.policy.continuations import Continuations


def chain(tag: str, length: int, head: int = 0) -> list[str]:
    """Names of blocks; the first `head` are everybody's."""
    return [f"head {k}" if k < head else f"{tag} {k}" for k in range(length)]


def test_a_prompt_that_keeps_most_of_another_continues_its_session() -> None:
    known = Continuations()
    first = chain("a", 20)
    assert known.session_of(first, "one", ()) == "one"
    assert known.session_of([*first, "a 20", "a 21"], "two", ()) == "one"
    assert known.session_of([*first[:18], "b"], "three", ()) == "one", "the end was written anew"
    assert known.session_of([*first[:10], "c"], "four", ()) == "four", "half of it: another's"


def test_a_shared_head_makes_no_session() -> None:
    known = Continuations()
    for name in ("a", "b", "c"):
        assert known.session_of(chain(name, 30, head=20), name, ()) == name
    for name in ("c", "a", "b"):
        assert known.session_of(chain(name, 33, head=20), "fresh", ()) == name


def test_nobody_continues_a_session_that_is_not_answered_yet() -> None:
    known = Continuations()
    known.session_of(chain("a", 10), "one", ())
    assert known.session_of(chain("a", 12), "two", {"one"}) == "two"


def test_what_is_forgotten_is_continued_by_nobody_and_holds_nothing() -> None:
    known = Continuations()
    known.session_of(chain("a", 10), "one", ())
    known.forget("one")
    known.forget("one")
    assert known.session_of(chain("a", 11), "two", ()) == "two"
    known.forget("two")
    assert not known._owner and not known._prompts


def test_prompts_without_a_block_take_nobodys_place(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(continuations, "MOST_SESSIONS", 10)
    known = Continuations()
    known.session_of(chain("a", 10), "one", ())
    for k in range(20):
        assert known.session_of([], f"short {k}", ()) == f"short {k}"
    assert known.session_of(chain("a", 11), "two", ()) == "one"


def test_memory_is_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(continuations, "MOST_SESSIONS", 10)
    known, rng = Continuations(), random.Random(3)
    for k in range(200):
        known.session_of(chain(f"s{rng.randrange(40)}", 5), str(k), ())
        assert len(known._prompts) <= 10 and len(known._owner) <= 50


def test_memory_is_bounded_by_blocks_too(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(continuations, "MOST_BLOCKS", 100)
    known, rng = Continuations(), random.Random(4)
    for k in range(300):
        length = rng.choice([1, 30, 70, 150])
        session = known.session_of(chain(f"s{rng.randrange(40)}", length), str(k), ())
        total = sum(map(len, known._prompts.values()))
        assert known._num_blocks == total and len(known._owner) <= total
        assert total <= 100 or list(known._prompts) == [session], "the newest is always known"


def test_who_holds_a_prompt_is_not_told_by_a_beginning_that_others_share() -> None:
    known = Continuations()
    known.session_of(chain("a", 1, head=1), "short", ())
    known.session_of(chain("b", 8, head=1), "long", {"short"})
    assert known.holder(chain("a", 1, head=1)) is None, "the block was had last by another"
    assert known.holder(chain("b", 8, head=1)) == "long"
    assert known.holder(chain("b", 9, head=1)) == "long", "its answer is sent along"
    assert known.holder(chain("b", 4, head=1)) is None and known.holder([]) is None
