"""Our own engine on the ladder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tests.engine.checkpoints import write_checkpoint
from tests.ladder import store
from tests.ladder.climb import LadderEngine, Life, PuppetLife, Run, Start
from tests.puppet import Puppet
from tests.warm import FORKS

PAGE = 16
FORKS.set_forkserver_preload(["tests.e2e.warm_imports"])
CROWDED: dict[str, Any] = {"max_total_tokens": 640, "chunked_prefill_size": 48}
STATES: dict[str, Any] = {"max_mamba_cache_size": 96}
FEW_STATES = CROWDED | {"max_mamba_cache_size": 24}


class OwnProcess(Puppet):
    module = "tests.ladder.own_play"
    environment = {"OMP_NUM_THREADS": "1", "HIRADIX_CHECK": "1"}


class WarmOwnProcess(OwnProcess):
    is_warm = True


def _run(family: str, engine: dict[str, Any] | None = None, crowded: dict[str, Any] = CROWDED) -> Run:
    sizes = {"max_total_tokens": 4096, "chunked_prefill_size": 64, "max_running_requests": 8}
    return Run(partial(write_checkpoint, family), PAGE, sizes | (engine or {}), crowded)


class Own(LadderEngine):
    name = "hiradix"
    runs = {
        "full": _run("llama"),
        "window": _run("gemma3", {"swa_full_tokens_ratio": 0.5}),
        "latent": _run("deepseek"),
        "gated delta": _run("qwen3-next", STATES, FEW_STATES),
        "mamba 2": _run("bamba", STATES, FEW_STATES),
    }

    def start(self, run: Run, model: Path, start: Start) -> Life:
        cache: dict[str, Any] = {"page_size": run.page, "disable_radix_cache": True}
        if start.pages is not None:
            cache = {
                "page_size": run.page, "enable_hierarchical_cache": True, "hicache_no_regret": False,
                "hicache_ratio": 8.0, "hicache_storage_backend": store.NAME,
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_storage_backend_extra_config": store.keys(start.pages, run.page),
                "hicache_storage_identity": "ladder",
            }  # fmt: skip
            if start.layout:
                cache["hicache_mem_layout"] = start.layout
        setup = {
            "model": str(model), "cache": cache, "engine": dict(run.engine) | dict(start.settings),
            "fault": str(start.fault),
        }  # fmt: skip
        return PuppetLife((OwnProcess if start.is_new else WarmOwnProcess)(setup, start.log))
