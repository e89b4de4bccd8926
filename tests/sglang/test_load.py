"""Many requests at once over small pools, and requests that leave early; every step checked by both sides."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import httpx
import pytest

from tests.sglang.conftest import DEVICE_TOKENS, PAGE_SIZE
from tests.sglang.prompts import families, prompts
from tests.sglang.server import Reference, Server

END = 1  # the token that ends an answer


@pytest.mark.timeout(900)
def test_200_concurrent_requests_with_shared_prefixes(
    ours: Server, reference: Reference, tmp_path: Path
) -> None:
    """Chunked prefill, overlap scheduling, all tiers, a device pool of a few prompts."""
    keys = {"disk_storage_path": str(tmp_path), "max_size": "64MiB", "prefetch_threshold": PAGE_SIZE}
    ours.attach("disk", json.dumps(keys), hicache_storage_prefetch_policy="best_effort")
    asked = families(200, 12, "load")
    assert sum(map(len, asked)) > 15 * DEVICE_TOKENS
    reference.prepare(asked)
    answers = ours.ask_all(asked, 200)
    again = ours.ask_all(random.Random("order").sample(asked, 80), 80)
    assert sum(a.cached for a in answers) > 0.3 * sum(map(len, asked))
    assert sum(a.tier("host") + a.tier("storage") for a in [*answers, *again]) > 0
    reference.assert_same([*answers, *again])


def test_requests_are_retracted_when_the_pool_is_full(
    ours: Server, reference: Reference, tmp_path: Path
) -> None:
    """SGLang reserves less than these answers need: it takes requests back, which are matched again."""
    ours.attach("file", json.dumps({"file_storage_path": str(tmp_path), "prefetch_threshold": PAGE_SIZE}))
    candidates, length = prompts(24, 60, "retracted"), 250
    reference.prepare(candidates, length)
    asked = [p for p in candidates if END not in reference.answer(p, length).tokens]
    assert len(asked) * (60 + length) > 1.2 * DEVICE_TOKENS

    def num_retracted() -> float:
        return ours.metrics().get("sglang:num_retracted_requests_total", 0.0)

    before, sampling = num_retracted(), {"temperature": 0, "max_new_tokens": length}  # it may end sooner
    answers = ours.ask_together(asked, sampling)
    assert num_retracted() > before
    reference.assert_same(answers)


@pytest.mark.timeout(900)
def test_an_abort_storm_leaks_nothing(ours: Server, reference: Reference, tmp_path: Path) -> None:
    """Clients leave at any stage, others stay; then the pools are whole and answers are right."""
    keys = {"file_storage_path": str(tmp_path), "prefetch_threshold": PAGE_SIZE}
    ours.attach("file", json.dumps(keys), hicache_storage_prefetch_policy="wait_complete")
    staying = families(20, 4, "staying")
    for prompt in staying:
        ours.ask(prompt)
    ours.flush()  # so that prefetches and loads are under way when clients leave
    asyncio.run(_storm(ours.url, families(120, 6, "storm") + staying))
    reply = ours.admin("POST", "/abort_request", abort_all=True)
    assert reply.status_code == 200
    answers = ours.ask_all(staying, 10)
    reference.assert_same(answers)
    ours.detach()
    ours.flush()
    ours.assert_healthy()


async def _storm(url: str, asked: list[list[int]]) -> None:
    rng = random.Random("leaving")
    async with httpx.AsyncClient(timeout=300.0, limits=httpx.Limits(max_connections=200)) as client:

        async def leave_early(prompt: list[int], after_s: float) -> None:
            sampling = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
            try:
                async with asyncio.timeout(after_s):
                    async with client.stream("POST", f"{url}/generate", json=body) as reply:
                        async for _ in reply.aiter_bytes():
                            pass
            except TimeoutError:
                pass

        await asyncio.gather(*(leave_early(prompt, rng.uniform(0.0, 4.0)) for prompt in asked))
