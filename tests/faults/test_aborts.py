"""Clients that hang up at every stage: nothing leaks, nothing stalls, the next answer is right."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest

from hiradix.apps.bench.client import ChatRequest
from hiradix.apps.bench.report import compare
from tests.e2e.load import ask_all, leave_early, prompts, reference_answers, three_tiers
from tests.e2e.warm import WarmServer

NUM_CLIENTS = 12
NUM_CHARS = 2400


async def storm(url: str, requests: list[ChatRequest], rng: random.Random) -> None:
    """All requests at once; some clients leave before the first event, others after a few, one stays."""
    events = asyncio.Event()

    async def gone_at_the_first_sign_of_another(request: ChatRequest) -> None:
        asking = asyncio.create_task(leave_early(url, request, 99, lambda: None))
        await asyncio.wait([asking, asyncio.create_task(events.wait())], return_when=asyncio.FIRST_COMPLETED)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async with asyncio.TaskGroup() as group:
        group.create_task(leave_early(url, requests[0], 99, events.set))
        for request in requests[1:]:
            if rng.random() < 0.5:
                group.create_task(gone_at_the_first_sign_of_another(request))
            else:
                group.create_task(leave_early(url, request, rng.randint(1, 5), events.set))


def assert_nothing_leaked(url: str, log: Path) -> None:
    """The server gets idle, and then every device page is free."""
    flushed = httpx.post(f"{url}/flush_cache?timeout=60", timeout=90, trust_env=False)
    assert flushed.status_code == 200, (flushed.text, log.read_text()[-2000:])
    info = httpx.get(f"{url}/server_info", timeout=30, trust_env=False).json()["engine"]
    assert info["num_running"] == 0 and info["num_waiting"] == 0, info
    assert info["available_tokens"] == info["max_total_tokens"], info


@pytest.mark.long(15)
@pytest.mark.timeout(1800)
def test_abort_storms_leave_nothing_behind(tiny_model: Path, tmp_path: Path, num_runs: int) -> None:
    log, rng = tmp_path / "server.log", random.Random(21)
    asked = prompts(NUM_CLIENTS, NUM_CHARS, seed=1000)
    probes = asked[:3]
    reference = reference_answers(tiny_model, probes, tmp_path / "off.log")
    with WarmServer(three_tiers(tiny_model, tmp_path / "storage"), log) as server:
        for run in range(num_runs):
            # Seen prompts are loaded or prefetched when their client leaves, new ones are computed.
            fresh = prompts(NUM_CLIENTS // 2, NUM_CHARS, seed=run)
            requests = [*asked[: NUM_CLIENTS // 2], *fresh]
            rng.shuffle(requests)
            asyncio.run(storm(server.url, requests, rng))
            assert compare(ask_all(server.url, probes), reference).holds, log.read_text()[-2000:]
            if run % 2:
                assert_nothing_leaked(server.url, log)
        assert_nothing_leaked(server.url, log)
        assert server.exit_code() is None
    assert server.exit_code() == 0
