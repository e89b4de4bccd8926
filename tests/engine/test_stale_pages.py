"""What memory held before is nobody's business: not even numbers that are none are seen in an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hiradix.apps.engine import Engine, SamplingParams
from hiradix.config import HiCacheConfig
from hiradix.prefix_cache import build_prefix_cache
from tests.engine.checkpoints import Reference, prompts
from tests.engine.conftest import MakeEngine
from tests.engine.driving import serve, tokens

LENGTHS = (3, 40, 33, 47, 16, 29)
KINDS: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral-window": {}, "deepseek": {}, "gemma3": {"swa_full_tokens_ratio": 1.0},
    "lfm2": {"max_mamba_cache_size": 24}, "qwen3-next": {"max_mamba_cache_size": 24},
}  # fmt: skip


def spoil_free_memory(engine: Engine) -> None:
    """No number in any page or state slot that may be handed out; page 0 and slot 0 are never."""
    engine.flush()
    for pool in engine._pools.all:
        for at, spec in enumerate(pool.shape.arrays):
            for layer in pool._arrays[at]:
                layer[spec.rows(pool.page_size) :] = float("nan")


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("family", KINDS)
def test_what_free_pages_hold_is_seen_in_no_answer(
    family: str, page_size: int, chunk: int | None, reference: Callable[[str], Reference],
    make_engine: MakeEngine,
) -> None:  # fmt: skip
    judge = reference(family)
    engine = make_engine(
        model_path=str(judge.path), cache=HiCacheConfig(page_size=page_size), build_cache=build_prefix_cache,
        max_total_tokens=512, chunked_prefill_size=chunk, **KINDS[family],
    )  # fmt: skip
    spoil_free_memory(engine)
    asked = prompts(LENGTHS, seed=8)
    answers = serve(engine, asked, SamplingParams(max_new_tokens=12))
    judge.judge(asked, tokens(answers)).assert_holds()
