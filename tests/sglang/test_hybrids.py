"""A model with recurrent states on a live server: a gated delta network, over all tiers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.conftest import DEVICE_TOKENS, HIRADIX, HOST, LENGTH
from tests.sglang.models import write_gated_delta_model
from tests.sglang.prompts import families, prompts, tokens
from tests.sglang.server import Server, WarmServer, assert_right_at_once

# On a CPU a request has one state, so pages are of one token; few records: they leave the device as well.
ONE_STATE = ("--page-size", "1", "--disable-overlap-schedule", "--max-mamba-cache-size", "24")
FLAGS = (*HIRADIX, *HOST, "--max-running-requests", "4", *ONE_STATE)
RECORDED = LENGTH // 128 * 128  # where the last chunk begins is the last record that the same prompt finds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hybrid")
    server = WarmServer(write_gated_delta_model(folder / "model"), folder / "server", FLAGS)
    try:
        server.launch()
        yield server.wait()
    finally:
        server.stop()


@pytest.fixture
def states(server: Server) -> Iterator[Server]:
    server.detach()
    server.flush()
    yield server
    server.detach()
    server.flush()
    server.assert_healthy()


def test_pages_and_states_come_back_from_the_host(states: Server) -> None:
    assert "hybrid_ssm=True" in states.log()
    asked = prompts(2 * DEVICE_TOKENS // LENGTH, LENGTH, "states")
    first, again = [states.ask(p) for p in asked], [states.ask(p) for p in asked]
    assert all(a.cached == 0 for a in first) and all(a.cached == RECORDED for a in again)
    assert sum(a.tier("host") for a in again) >= RECORDED
    assert [a.tokens for a in again] == [a.tokens for a in first]


def test_an_answer_is_continued_from_the_state_behind_it(states: Server) -> None:
    prompt = tokens(200, "turns")
    answer = states.ask(prompt, 40)
    turn = [*prompt, *answer.tokens, *tokens(30, "next turn")]
    continued, alone = states.ask(turn), states.ask(turn, extra_key="apart")
    assert continued.cached == 239 and alone.cached == 0  # the last token of an answer is not computed
    assert continued.tokens == alone.tokens


def test_concurrent_requests_with_states(states: Server) -> None:
    assert_right_at_once(states, families(60, 5, "state load"))


@pytest.mark.parametrize("backend", ["file", "disk"])
def test_pages_and_states_come_back_from_storage(states: Server, backend: str, tmp_path: Path) -> None:
    keys = {f"{backend}_storage_path": str(tmp_path), "max_size": "16MiB", "prefetch_threshold": 1}
    policy = {"hicache_storage_prefetch_policy": "wait_complete"}
    asked = prompts(3, LENGTH, ("stored states", backend))
    states.attach(backend, json.dumps(keys), **policy)
    first = [states.ask(p) for p in asked]
    for _ in range(2):
        states.detach()
        states.flush()
        states.attach(backend, json.dumps(keys), **policy)
        again = [states.ask(p) for p in asked]
        assert [a.tier("storage") for a in again] == [RECORDED] * len(asked), [a.details for a in again]
        assert [a.tokens for a in again] == [a.tokens for a in first]
