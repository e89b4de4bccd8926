"""LoRA adapters on a live SGLang: loaded, unloaded, under a name that others had, trained further."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.lora import adapter
from tests.sglang.lora_run import PROMPT, answers, start
from tests.sglang.server import PATIENT

PAGE = 16
WHOLE = (len(PROMPT) - 1) // PAGE * PAGE


def flags(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "page_size": PAGE, "max_total_tokens": 2048, "max_running_requests": 4, "chunked_prefill_size": 64,
        "lora_paths": [f"a={folder / 'a'}"], "lora_backend": "torch_native", "enable_lora": True,
        "max_lora_rank": 8, "lora_target_modules": ["q_proj", "k_proj", "v_proj"], "max_loras_per_batch": 2,
        **more,
    }  # fmt: skip


def acts_with(folder: Path, name: str) -> list[list[str | None]]:
    """b's folder is the process's own: SGLang maps it, and ends where another writes in it meanwhile."""
    first, second, b = str(folder / "b"), str(folder / "b2"), str(folder / f"b of {name}")
    return [
        *(["put", first, b], ["ask", None], ["ask", "a"], ["load", "b", b], ["ask", "b"]),
        *(["ask", "b"], ["unload", "b"], ["put", second, b], ["load", "b", b], ["ask", "b"]),
        *(["ask", None], ["ask", "a"], ["flush"], ["ask", None], ["ask", "a"], ["ask", "b"]),
    ]


def test_no_hit_crosses_adapters_in_any_tier(model: Path, tmp_path: Path) -> None:
    """Each answers as without a cache; a restart finds in storage what the same weights stored."""
    for seed, name in enumerate(("a", "b", "a2", "b2")):
        adapter(model, tmp_path / name, seed)
    extra = {"file_storage_path": str(tmp_path / "pages"), "prefetch_threshold": PAGE} | PATIENT
    ours = {
        "radix_cache_backend": "hiradix", "enable_hierarchical_cache": True, "hicache_ratio": 4.0,
        "hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }  # fmt: skip
    logs = [tmp_path / name for name in ("plain.log", "ours.log", "again.log")]
    both = [
        start(log, model_path=str(model), flags=flags(tmp_path, **one), acts=acts_with(tmp_path, log.stem))
        for log, one in zip(logs, ({"disable_radix_cache": True}, ours), strict=False)
    ]
    plain, cached = (answers(process, log) for process, log in zip(both, logs, strict=False))
    assert [tokens for tokens, _, _ in cached] == [tokens for tokens, _, _ in plain]
    assert len({tuple(tokens) for tokens, _, _ in plain}) == 4, "no adapter, a, b and the other b"
    assert [count for _, count, _ in cached] == [0, 0, 0, WHOLE, 0, *[WHOLE] * 5]
    assert [details.get("storage", 0) for _, _, details in cached] == [0] * 7 + [WHOLE] * 3
    shutil.copytree(tmp_path / "a2", tmp_path / "a", dirs_exist_ok=True)
    again = [*([["ask", None], ["ask", "a"], ["flush"]] * 2), ["ask", None], ["ask", "a"]]
    process = start(logs[2], model_path=str(model), flags=flags(tmp_path, **ours), acts=again)
    found = answers(process, logs[2])
    for first, of_a in (found[:2], found[2:4], found[4:]):
        assert first[0] == plain[0][0] and of_a[0] == found[1][0] != plain[1][0]
    from_storage = [details.get("storage", 0) for _, _, details in found]
    assert from_storage == [0, 0] + [WHOLE] * 4, "compared, then served"
