"""Speculative decoding: drafts beyond what is known, and results that vLLM asks for before the save."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.vllm.player import Player, assert_same, cached
from tests.vllm.test_host import conversation

Start = Callable[..., Player]
NGRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_drafts_change_no_answer_and_no_page(start: Start, plain: Player, mode: str) -> None:
    """Prompts of a few numbers in turns, so that drafts are often right and often wrong; then the next turn,
    which begins with their answers: those pages were saved while drafts came and went."""
    prompts = [conversation(seed, 6) * 30 for seed in range(4)]
    ours = start({"hicache_size": 0.1, "load_mode": mode}, speculative_config=NGRAMS)
    first = plain.generate(prompts, max_tokens=70)
    assert_same(first, ours.generate(prompts, max_tokens=70))
    ours.settle()
    turns = [prompt + answer["tokens"] + [7, 8] for prompt, answer in zip(prompts, first, strict=True)]
    expected, got = plain.generate(turns), ours.generate(turns)
    assert_same(expected, got)
    assert cached(got) == sum((len(turn) - 3) // 32 * 32 for turn in turns)
    ours.settle()
    assert ours.state()["idle"]
