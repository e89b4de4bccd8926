"""Requests that wait inside a real vLLM use what storage has for them, however many wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.player import Player, assert_same, cached
from tests.vllm.test_host import conversation
from tests.vllm.test_storage import until, with_storage

BLOCK = 32
NUM_TOKENS = 401
PROMPTS = [conversation(900 + seed, NUM_TOKENS) for seed in range(40)]
STORED = len(PROMPTS) * (NUM_TOKENS // BLOCK * BLOCK)  # of them all, the last token is computed


@pytest.mark.long(60)
def test_what_waits_keeps_what_was_fetched_for_it(start: Callable[..., Player], tmp_path: Path) -> None:
    """The device has 2,048 tokens, the host 4,096: five of the prompts fit, and ten."""
    extra = with_storage("file", file_storage_path=str(tmp_path / "file"))
    extra |= {"hicache_size": 0, "hicache_ratio": 2.0}
    ours = start(extra, num_gpu_blocks_override=2048 // BLOCK + 1, max_model_len=1024, max_num_seqs=32)
    expected = [answer for prompt in PROMPTS for answer in ours.generate([prompt])]
    until(ours, lambda state: state["idle"] and state["stored_pages"] * BLOCK == STORED)
    for at_once in (1, 10, 20, 40):
        assert ours.ask("reset")
        before, answers = ours.state(), []
        for first in range(0, len(PROMPTS), at_once):
            answers += ours.generate(PROMPTS[first : first + at_once])
        assert_same(expected, answers)
        used = cached(answers)
        fetched = (until(ours, lambda state: state["idle"])["fetch_read"] - before["fetch_read"]) * BLOCK
        assert used >= 0.95 * STORED, (at_once, used, STORED)
        assert fetched <= 1.1 * used, (at_once, fetched, used)
