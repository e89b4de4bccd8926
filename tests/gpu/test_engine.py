"""The reference engine on the device: its answers are those of transformers, from whatever tier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from hiradix.apps.engine import Engine, EngineConfig
from hiradix.config import HiCacheConfig
from hiradix.prefix_cache import build_prefix_cache
from tests.engine.checkpoints import Reference, write_checkpoint
from tests.engine.conftest import recorded_host_pools
from tests.engine.driving import assert_empty
from tests.engine.test_tiers import converse, served_from

IO = ("kernel", "direct", "auto")


def engine_on(device: torch.device, path: Path, io_backend: str, layout: str) -> Engine:
    cache = HiCacheConfig(
        page_size=16,
        enable_hierarchical_cache=True,
        hicache_no_regret=False,
        hicache_ratio=2.0,
        hicache_io_backend=io_backend,
        hicache_mem_layout=layout,
    )
    config = EngineConfig(
        str(path), device=str(device), cache=cache, max_total_tokens=384, chunked_prefill_size=64, check=True
    )
    return Engine(config, build_cache=build_prefix_cache)


@pytest.mark.parametrize(
    ("family", "io_backend", "layout"),
    [
        *(("llama", io_backend, "page_first") for io_backend in IO),
        ("llama", "direct", "page_first_direct"),
        ("llama", "auto", "layer_first"),
        ("deepseek", "auto", "page_first"),
    ],
)
def test_answers_through_the_host(
    family: str, io_backend: str, layout: str, device: torch.device, tmp_path: Path
) -> None:
    write_checkpoint(family, tmp_path)
    engine = engine_on(device, tmp_path, io_backend, layout)
    try:
        identity, answers = converse(engine, Reference.load(tmp_path))
        identity.assert_holds()
        assert_empty(engine)
        assert served_from(answers)["host"] > 0
    finally:
        engine.close()


def test_a_damaged_page_is_seen(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: with host pages overwritten the same comparison must fail."""
    pools = recorded_host_pools(monkeypatch)
    write_checkpoint("llama", tmp_path)
    engine = engine_on(device, tmp_path, "auto", "page_first")
    try:
        load, (pool,) = engine.cache.init_load_back, pools

        def damaged(*args: object) -> object:
            pool.buffer.view(torch.float32).fill_(0.5)
            return load(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(engine.cache, "init_load_back", damaged)
        identity, _ = converse(engine, Reference.load(tmp_path))
        with pytest.raises(AssertionError):
            identity.assert_holds()
    finally:
        engine.close()
