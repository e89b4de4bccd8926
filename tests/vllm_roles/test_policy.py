"""What the host's eviction policy is told of requests: what they used, and how they ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hiradix.adapters.vllm.requests import track
from hiradix.policy.uses import LastUse
from hiradix.tree import Node
from tests.vllm_roles.mini_vllm import FakeRequest, MiniVLLM, S, World

POLICIES = ("ghd", "2q")


def prompt(first: int, num_pages: int) -> list[int]:
    return [first * 100 + i for i in range(num_pages * S + 1)]


def served(vllm: MiniVLLM, name: str, tokens: list[int], max_tokens: int = 1) -> FakeRequest:
    request = FakeRequest(name, list(tokens), max_tokens)
    vllm.add(request)
    vllm.drain()
    return request


def on_host(vllm: MiniVLLM, request: FakeRequest) -> int:
    """Leading pages of a request's prompt that the host has."""
    tracked = track(request, S)
    assert tracked is not None
    return vllm.index.find(tracked.key(request.num_prompt // S, S)).num_pages


def notes(vllm: MiniVLLM) -> list[Any]:
    found: list[Any] = []
    todo: list[Node] = list(vllm.index.tree.root.children.values())
    while todo:
        node = todo.pop()
        found.append(node.note)
        todo += node.children.values()
    return found


def test_what_vllm_itself_still_had_counts_as_used_on_the_host() -> None:
    vllm = MiniVLLM(World(num_blocks=60, host_pages=8, budget=40, prefix_cache=True))
    first, second = FakeRequest("a", prompt(1, 4), 1), FakeRequest("b", prompt(2, 4), 1)
    vllm.add(first)
    vllm.add(second)
    vllm.drain()
    served(vllm, "a again", prompt(1, 4))
    assert vllm.local_tokens == 4 * S and vllm.hit_tokens == 0
    served(vllm, "c", prompt(3, 4))
    assert on_host(vllm, first) == 4, "what was used last left first"
    assert on_host(vllm, second) == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
def test_each_request_that_ends_is_learned_once(policy: str, write_policy: str) -> None:
    vllm = MiniVLLM(World(num_blocks=60, host_pages=40, policy=policy, write_policy=write_policy))
    num_tokens = 0
    for number in range(3):
        for name in ("new", "again"):
            num_tokens += served(vllm, f"{name} {number}", prompt(number + 1, 3 + number), 3).num_tokens
    learner = vllm.index.learner
    assert learner is not None and learner.clock == num_tokens


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("load_async", [False, True])
def test_a_conversation_goes_on(policy: str, load_async: bool) -> None:
    vllm = MiniVLLM(World(num_blocks=60, host_pages=40, load_async=load_async, policy=policy))
    said = served(vllm, "turn 1", prompt(1, 3), 2 * S).all_token_ids
    served(vllm, "turn 2", [*said, *prompt(2, 2)], 2 * S)
    found = notes(vllm)
    assert found and all(isinstance(note, LastUse) for note in found), found
    assert max(note.use.turn for note in found) == 1, "the second turn, from 0"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_never_ran_says_nothing(policy: str) -> None:
    vllm = MiniVLLM(World(policy=policy))
    request = FakeRequest("a", prompt(1, 3), 1)
    vllm.add(request)
    vllm.abort(request)
    vllm.drain()
    assert vllm.index.learner is not None and vllm.index.learner.clock == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_computed_before_a_reset_says_nothing(policy: str) -> None:
    vllm = MiniVLLM(World(policy=policy, budget=40))
    request = FakeRequest("a", prompt(1, 3), 4)
    vllm.add(request)
    vllm.step()
    assert request.num_computed_tokens > 3 * S
    vllm.update_weights(preempts=False)
    vllm.drain()
    assert vllm.index.learner is not None and vllm.index.learner.clock == 0


def test_what_was_learned_is_kept_when_the_engine_ends(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    vllm = MiniVLLM(World(policy="ghd", tables=str(path)))
    served(vllm, "a", prompt(1, 3))
    vllm.index.close()
    assert path.stat().st_size > 0
    MiniVLLM(World(policy="ghd", tables=str(path)))  # takes what it finds


def test_a_policy_that_learns_nothing_is_told_nothing() -> None:
    vllm = MiniVLLM(World())
    served(vllm, "a", prompt(1, 3))
    assert vllm.index.learner is None and all(note is None for note in notes(vllm))
    vllm.index.close()
