"""Requests that wait inside a real SGLang use what storage has for them, however many wait."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hiradix.transfer import JobKind
from tests.sglang.engine_run import run
from tests.sglang.prompts import prompts
from tests.sglang.rig import PAGE as RIG_PAGE
from tests.sglang.rig import Rig
from tests.sglang.server import PATIENT

PAGE = 16
NUM_PROMPTS, NUM_TOKENS = 40, 401
STORED = NUM_TOKENS // PAGE * PAGE  # of each
MOST_COMPUTED = NUM_PROMPTS // 2  # by a fresh process, until one has been compared with what is stored
POLICIES = [(40, "fcfs"), (10, "lpm")]  # at once, and how SGLang orders those who wait


@pytest.mark.long(120)
def test_what_waits_keeps_what_was_fetched_for_it(model: Path, tmp_path: Path) -> None:
    """The device has 2,048 tokens, the host 4,096: five of the prompts fit, and ten. Those that run before one
    has been compared are computed; the others, which storage had to leave unserved, ask again."""
    store = tmp_path / "store"
    keys = PATIENT | {"prefetch_threshold": PAGE, "file_storage_path": str(store)}
    flags: dict[str, Any] = {
        "radix_cache_backend": "hiradix", "max_total_tokens": 2048, "max_running_requests": 32,
        "page_size": PAGE, "enable_hierarchical_cache": True, "hicache_ratio": 2.0,
        "hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(keys),
    }  # fmt: skip
    asked = prompts(NUM_PROMPTS, NUM_TOKENS, "waiting")

    def life(name: str, **more: Any) -> list[tuple[list[int], int, dict[str, Any]]]:
        folder = tmp_path / name
        folder.mkdir()
        own = flags | more.pop("flags", {})
        (answers,) = run(folder, model_path=str(model), prompts=asked, rounds=1, flags=own, **more)
        return answers

    first = life("first", files=[str(store), NUM_PROMPTS * STORED // PAGE])
    assert sum(cached for _, cached, _ in first) == 0
    for at_once, policy in POLICIES:
        again = life(f"again{at_once}", at_once=at_once, flags={"schedule_policy": policy})
        used = [details.get("storage", 0) for _, _, details in again]
        computed = used.count(0)
        assert computed <= MOST_COMPUTED, (at_once, policy, used)
        assert sum(used) >= 0.95 * (NUM_PROMPTS - computed) * STORED, (at_once, policy, used)
        assert [tokens for tokens, _, _ in again] == [tokens for tokens, _, _ in first]


def test_what_many_requests_want_at_once_is_read_once(tmp_path: Path) -> None:
    """Four equal requests of eight pages, and a system prompt of 32 with 64 clients, over SGLang's records."""
    equal, system = ([*range(start, start + count * RIG_PAGE)] for start, count in ((100, 8), (1000, 32)))
    rig = Rig(tmp_path)
    for prompt in (equal, system):
        rig.run([*prompt, 1])
    rig.settle()
    rig.cache.reset()
    num_read = 0
    for prompt, count in ((equal, 4), (system, 64)):
        waiting = [rig.request([*prompt, 2000 + number, 1]) for number in range(count)]
        handles = [rig.prefetch(req) for req in waiting]
        rig.settle()
        assert all(rig.cache.check_prefetch_progress(handle) for handle in handles)
        assert {rig.match(req).host_hit_length for req in waiting} == {len(prompt)}
        num_read += len(prompt) // RIG_PAGE
        assert rig.cache.inner.controller.stats().kinds[JobKind.READ].num_pages == num_read
        for req in waiting:
            rig.admit(req)
            rig.finish(req)
    rig.settle()
    rig.check()
