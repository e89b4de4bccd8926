"""`hiradix size DIR` says of a model's folder what the engine's own pools take for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hiradix.apps.engine.api import EngineConfig
from hiradix.apps.engine.model import kv_shape, load_config, windows_of
from hiradix.apps.engine.pools import build_pools
from hiradix.apps.engine.recurrent import states_of
from hiradix.apps.replay.kv_bytes import read_kv_bytes
from hiradix.config import HiCacheConfig
from hiradix.memory import page_bytes
from tests.engine.checkpoints import FAMILIES, Reference

PAGE = 8


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_folder_says_what_the_pools_take(family: str, reference: Callable[[str], Reference]) -> None:
    path = reference(family).path
    found, config, dtype = read_kv_bytes(Path(path), None), load_config(str(path)), torch.float32
    kinds = states_of(config, dtype) or windows_of(config)
    windows = windows_of(config) is not None
    engine = EngineConfig(
        model_path=str(path), max_total_tokens=4096, max_running_requests=2, chunked_prefill_size=64,
        swa_full_tokens_ratio=0.5 if windows else None, cache=HiCacheConfig(page_size=PAGE),
    )  # fmt: skip
    pools = build_pools(engine, kv_shape(config, dtype), kinds, 512)
    assert pools.bytes_per_token == found.most_per_token
    if windows:
        each = [page_bytes(pool.shape, PAGE) // PAGE for pool in pools.all]
        assert each == [found.per_token, found.per_window_token] and pools.window == found.window
    elif len(pools.all) == 2:
        assert page_bytes(pools.all[1].shape, 1) == found.per_state
    else:
        assert found.layers["state"] == 0
