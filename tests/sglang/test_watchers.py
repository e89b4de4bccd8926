"""What others see of a live server: metrics, which sgtop reads, and KV events, which radixview reads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from radixview.discover import publishers_from_info
from radixview.subscribe import listen
from radixview.tree import CacheTree
from sgtop.direct import DirectClient

from tests.sglang.conftest import DEVICE_TOKENS, LENGTH, PAGE_SIZE, WHOLE
from tests.sglang.prompts import prompts
from tests.sglang.server import Server, until


def test_metrics_of_every_tier(ours: Server, tmp_path: Path) -> None:
    keys = {"file_storage_path": str(tmp_path), "prefetch_threshold": PAGE_SIZE}
    ours.attach("file", json.dumps(keys), hicache_storage_prefetch_policy="wait_complete")
    before = ours.metrics()
    asked = prompts(2 * DEVICE_TOKENS // LENGTH, LENGTH, "metrics")
    for prompt in [*asked, *asked]:
        ours.ask(prompt)
    ours.flush()
    answers = [ours.ask(p) for p in asked[:2]]
    after: dict[str, float] = {}

    def grown(name: str) -> float:
        return after.get(f"sglang:{name}", 0.0) - before.get(f"sglang:{name}", 0.0)

    def told() -> bool:  # with a step of SGLang's, which may come behind the answer
        after.update(ours.metrics())
        return grown("prefetched_tokens_total") >= 2 * WHOLE and grown("backuped_tokens_total") >= stored

    stored = WHOLE * len(asked)
    until(told)
    assert grown("evicted_tokens_total") > 0
    assert grown("load_back_tokens_total") >= WHOLE * len(asked) // 2
    assert grown("hicache_backup_tokens_total") >= stored
    assert grown("hicache_backup_bytes_total") > grown("hicache_backup_tokens_total")
    assert (
        grown("load_back_duration_seconds_count") > 0 and grown("hicache_backup_duration_seconds_count") > 0
    )
    assert grown("prefetched_tokens_total") == sum(a.tier("storage") for a in answers) == 2 * WHOLE
    assert after["sglang:hicache_host_total_tokens"] == 4 * DEVICE_TOKENS
    assert after["sglang:cached_tokens_total"] > 0


def test_sgtop_reads_the_server(ours: Server) -> None:
    prompt = prompts(1, LENGTH, "sgtop")[0]
    top = DirectClient("127.0.0.1", ours.port)

    def seen() -> bool:
        ours.ask(prompt)
        top.poll()
        snapshot = top.snapshot()
        return snapshot["service_up"] and any(snapshot["prom"]["cache_hit_by_dp"].values())

    until(seen)
    assert top.snapshot()["caps"]["DP0"]["max_tokens"] == DEVICE_TOKENS


@pytest.fixture
def seen(ours: Server) -> Iterator[CacheTree]:
    """radixview's picture of our server's cache."""
    info = httpx.get(f"{ours.url}/server_info", timeout=30.0).json()
    assert info["kv_events"]["block_size"] == PAGE_SIZE
    # radixview finds only servers that publish on every address; this one keeps to its own
    info["kv_events"]["endpoint_host"] = "*"
    tree, stop = CacheTree(), threading.Event()
    watcher = threading.Thread(target=listen, args=(publishers_from_info(ours.url, info), stop, None, tree))
    watcher.start()
    ours.flush()
    yield tree
    stop.set()
    watcher.join(30)


BLOCKS = (LENGTH + 5) // PAGE_SIZE  # with the tokens of an answer of 6, whose last is never read


def media(tree: CacheTree) -> list[str]:
    view = tree.view()
    return [block.medium for run in view.runs.values() for block in run]


def test_radixview_sees_blocks_move_between_tiers(ours: Server, seen: CacheTree) -> None:
    first = prompts(1, LENGTH, ("events", "first"))[0]

    def connected() -> bool:  # a subscriber hears only what is published after it has joined
        ours.flush()
        ours.ask(first)
        deadline = time.monotonic() + 5.0  # events come behind the answer, on a busy machine by seconds
        while len(media(seen)) != BLOCKS and time.monotonic() < deadline:
            time.sleep(0.05)
        return len(media(seen)) == BLOCKS

    until(connected)
    for prompt in prompts(2 * DEVICE_TOKENS // LENGTH, LENGTH, "events"):
        ours.ask(prompt)
    num_blocks = (1 + 2 * DEVICE_TOKENS // LENGTH) * BLOCKS
    until(lambda: media(seen) == ["CPU_PINNED"] * num_blocks)  # the viewer shows where a block came to last
    again = ours.ask(first)
    assert again.tier("host") == WHOLE
    until(lambda: media(seen).count("GPU") == BLOCKS)  # what was loaded, and the page computed anew
    assert len(media(seen)) == num_blocks
    ours.flush()
    until(lambda: not media(seen))
