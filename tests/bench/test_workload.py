"""The workload: real, repeatable, long enough, and able to be played to the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from hiradix.apps.bench import workload
from hiradix.apps.bench.workload import Size, long_text, make_workload
from hiradix.errors import ConfigError

pytest.importorskip("chitchat_dataset")


def test_it_is_the_same_every_time() -> None:
    assert make_workload() == make_workload()


def test_every_visit_has_a_turn_to_send() -> None:
    made = make_workload()
    turns = {c.name: len(c.user_turns) for c in made.conversations}
    visits = [name for phase in made.phases for name in phase.visits]
    assert all(visits.count(name) <= turns[name] for name in turns)
    assert {name for name in visits} == set(turns)
    assert made.num_requests == len(visits)
    assert [phase.restart for phase in made.phases] == [False, False, True, False]


def test_chats_alternate_and_end_with_the_other_person() -> None:
    for conversation in make_workload().conversations:
        roles = [m.role for m in conversation.history]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(conversation.user_turns) and all(m.content for m in conversation.history)


def test_some_share_a_long_system_prompt_and_the_others_share_none() -> None:
    systems: dict[str, list[str]] = {}
    for c in make_workload().conversations:
        systems.setdefault(c.system, []).append(c.name)
    shared = [names for names in systems.values() if len(names) > 1]
    assert len(shared) == 1 and all(name.startswith("shared-") for name in shared[0])


def test_documents_are_long_and_start_differently() -> None:
    documents = [c.system for c in make_workload().conversations if c.name.startswith("text-")]
    assert all(len(system) > workload.DOCUMENT_CHARS for system in documents)
    assert len({system[:60] for system in documents}) == len(documents)


def test_long_text_comes_from_installed_packages_where_the_system_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(workload, "LICENSES", tmp_path / "none")
    text = long_text(20_000)
    assert len(text) >= 20_000 and "  " not in text


def test_too_little_text_says_how_much_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workload, "_license_files", lambda: iter(()))
    with pytest.raises(ConfigError, match="found 0 of 10"):
        long_text(10)


def test_a_smaller_size_is_smaller() -> None:
    assert make_workload(Size(2, 2, 1, 1, 1, 1)).num_requests == 5 + 5 + 3 + 3
