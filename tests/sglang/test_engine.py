"""SGLang's Engine with other flags than the live servers have: page sizes, write-back, layouts, orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.sglang.engine_run import run
from tests.sglang.install import old_packages, packages_before
from tests.sglang.prompts import prompts
from tests.sglang.server import Reference

LENGTH = 200
BASE: dict[str, Any] = {
    "radix_cache_backend": "hiradix", "max_total_tokens": 1024, "max_running_requests": 4,
    "chunked_prefill_size": 64,
}  # fmt: skip


def assert_same(asked: list[list[int]], rounds: list[Any], reference: Reference) -> None:
    reference.prepare(asked)
    for answers in rounds:
        for prompt, (tokens, _, _) in zip(asked, answers, strict=True):
            assert tuple(tokens) == reference.answer(prompt).tokens


def test_write_back_with_pages_of_one_token(model: Path, reference: Reference, tmp_path: Path) -> None:
    flags = BASE | {
        "page_size": 1, "enable_hierarchical_cache": True, "hicache_ratio": 4.0,
        "radix_eviction_policy": "slru", "hicache_write_policy": "write_back",
        "hicache_mem_layout": "layer_first", "hicache_io_backend": "direct",
    }  # fmt: skip
    asked = prompts(10, LENGTH, "write back")
    rounds = run(tmp_path, model_path=str(model), prompts=asked, rounds=2, flags=flags)
    assert [cached for _, cached, _ in rounds[0]] == [0] * len(asked)
    assert [cached for _, cached, _ in rounds[1]] == [LENGTH - 1] * len(asked)
    assert sum(details["host"] for _, _, details in rounds[1]) >= LENGTH * 4
    assert_same(asked, rounds, reference)


def test_the_device_alone_without_overlap(model: Path, reference: Reference, tmp_path: Path) -> None:
    flags = BASE | {"page_size": 32, "disable_overlap_schedule": True, "radix_eviction_policy": "lfu"}
    asked = prompts(3, LENGTH, "device alone")
    rounds = run(tmp_path, model_path=str(model), prompts=asked, rounds=2, flags=flags)
    assert [cached for _, cached, _ in rounds[1]] == [LENGTH // 32 * 32] * len(asked)
    assert_same(asked, rounds, reference)


def test_an_older_sglang_with_its_older_contract(model: Path, reference: Reference, tmp_path: Path) -> None:
    """0.5.15: device and host. Its allocator's kernels run in Triton's interpreter."""
    flags = BASE | {"page_size": 16, "enable_hierarchical_cache": True, "hicache_ratio": 4.0}
    asked = prompts(8, LENGTH, "older")
    rounds = run(tmp_path, old_packages(), model_path=str(model), prompts=asked, rounds=2, flags=flags)
    assert [cached for _, cached, _ in rounds[1]] == [LENGTH // 16 * 16] * len(asked)
    assert sum(details["host"] for _, _, details in rounds[1]) >= LENGTH * 3
    assert_same(asked, rounds, reference)


def test_the_release_before(model: Path, reference: Reference, tmp_path: Path) -> None:
    """0.5.22: the same contract, over all tiers; the log says that it has all that is used."""
    folder = tmp_path / "stored"
    extra = f'{{"file_storage_path": "{folder}", "prefetch_threshold": 16}}'
    flags = BASE | {
        "page_size": 16, "enable_hierarchical_cache": True, "hicache_ratio": 4.0,
        "hicache_storage_backend": "file", "hicache_storage_backend_extra_config": extra,
    }  # fmt: skip
    asked = prompts(8, LENGTH, "before")
    rounds = run(tmp_path, packages_before(), model_path=str(model), prompts=asked, rounds=2, flags=flags)
    assert [cached for _, cached, _ in rounds[1]] == [LENGTH // 16 * 16] * len(asked)
    assert sum(details["host"] for _, _, details in rounds[1]) >= LENGTH * 3
    assert len([*folder.rglob("*")]) > len(asked)
    assert_same(asked, rounds, reference)
