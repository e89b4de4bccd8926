"""Sessions that share ends, that name one another's, that come without end; and many that do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from hiradix.apps.engine import session_ends
from hiradix.apps.engine.api import Scope
from hiradix.policy import admission_controller
from tests.engine.test_turns import PAGE, Server, prompt_of


def ended(server: Server, **scope: Any) -> None:
    """A client says that a session is over."""
    server.turns.session_ended((), Scope(hint="end_of_session", **scope))


@pytest.mark.parametrize("more", [0, 40], ids=["where another ends", "behind where another ends"])
def test_what_leaves_takes_nothing_along_that_another_session_goes_on_from(more: int) -> None:
    server, prompt = Server("cached", num_pages=64), prompt_of(1, 81)
    server.ask("other", prompt_of(5, 61), session="other")
    server.work()
    server.ask("stays", prompt, session="stays")
    server.work()
    server.ask("leaves", prompt + prompt_of(7, more), session="leaves")
    server.work()
    ended(server, session="leaves")
    free = 64 * PAGE - server.cache.total_size()
    server.ask("new", prompt_of(3, free + more + 4 * PAGE), session="new")
    server.work()
    server.ask("again", prompt + prompt_of(9, 3), session="stays")
    server.work()
    assert server.turned["again"].hit >= 80
    server.assert_empty()


def test_an_end_that_two_sessions_have_goes_when_both_left() -> None:
    server, prompt = Server("cached", num_pages=64), prompt_of(1, 81)
    server.ask("old", prompt_of(5, 61), session="old")
    server.work()
    for name in "ab":
        server.ask(name, prompt, session=name)
        server.work()
        ended(server, session=name)
    server.ask("new", prompt_of(3, 64 * PAGE - server.cache.total_size() + 4 * PAGE), session="new")
    server.work()
    server.ask("again", prompt_of(5, 61), session="old")
    server.work()
    assert server.turned["again"].hit == 60
    assert not server.turns.ends._num_at.keys() - {end.node for end in server.turns.ends._ends.values()}


@pytest.mark.parametrize(
    "others",
    [
        {"cache_salt": "y"},
        {"cache_salt": None},
        {"extra_key": "of another user"},
        {"cache_salt": "x\0a", "session": "b"},
        {"cache_salt": "x", "session": "a\0b"},
    ],
)
def test_nobody_ends_or_continues_a_session_of_another_namespace(others: dict[str, Any]) -> None:
    server, mine = Server("cached"), {"cache_salt": "x", "session": "a"}
    if "session" in others:
        mine = {"cache_salt": "x", "session": "a\0b"} if others["cache_salt"] != "x" else mine
    server.ask("mine", prompt_of(1, 40), **mine)
    server.work()
    assert server.turns.policy.num_in == 1
    ended(server, **(mine | others))
    assert server.turns.policy.num_in == 1, "it was ended by another"
    server.ask("theirs", prompt_of(1, 40), **(mine | others))
    server.work()
    assert len(server.turns.ends._ends) == 2
    ended(server, **mine)
    assert server.turns.policy.num_in == 1


def test_sessions_without_end_are_not_kept() -> None:
    """A new session each time, of a prompt that is there already: nothing is ever evicted."""
    server = Server("cached", num_pages=64)
    for number in range(300):
        server.ask(f"r{number}", prompt_of(1, 20), session=f"s{number}")
        server.work()
        ended(server, session=f"s{number}")
    assert len(server.turns.policy.take_left()) <= 1
    assert len(server.turns.ends._left) <= len(server.turns.ends._ends)


def test_the_policy_follows_no_more_sessions_than_are_known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does when a request comes costs all sessions that it follows."""
    for module in (admission_controller, session_ends):
        monkeypatch.setattr(module, "MOST_SESSIONS", 10)
    server = Server("cached", num_pages=64)
    for number in range(50):
        server.ask(f"r{number}", prompt_of(number, 20), session=f"s{number}")
        server.work()
        assert len(server.turns.policy._sessions) <= 10  # type: ignore[attr-defined]
        assert server.turns.ends._ends.keys() == server.turns.policy._sessions.keys()  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", ["lpm", "cached"])
def test_who_does_not_fit_beside_the_answers_under_way_is_not_looked_up_at_each_step(policy: str) -> None:
    server = Server(policy, num_pages=300, max_running=8)
    server.ask("runs", prompt_of(1, 100), num_answer=900, session="runs")
    while not server.told:
        server.step()
    server.scheduler._reserve = 1.0
    for number in range(50):
        server.ask(f"waits {number}", prompt_of(number + 2, 400), session=f"s{number}")
    server.step()
    looked_up: list[str] = []
    match = server.scheduler._match
    server.scheduler._match = lambda r: looked_up.append(r.rid) or match(r)  # type: ignore[method-assign]
    for _ in range(5):
        server.scheduler._reserve = 1.0
        server.step()
    assert len(looked_up) <= 5 and len(server.scheduler.waiting) == 50
