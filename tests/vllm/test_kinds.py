"""Kinds of models and engines: windows, several workers, SmolLM2, and the KV events of the host tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.seeded_model import seeded_model
from tests.vllm.conftest import REAL
from tests.vllm.player import Player, WarmPlayer, assert_same, cached, judge
from tests.vllm.test_host import conversation
from tests.vllm.test_server import Serving, cached_tokens, token_ids
from tests.vllm.test_storage import PATIENT, reference_engine, with_storage

Start = Callable[..., Player]
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "head_dim": 32,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip


def checkpoint(folder: Path, kind: str, **fields: Any) -> Path:
    """A seeded model of transformers' class `kind`."""
    seeded_model(kind, 3, **SIZES | fields).save_pretrained(folder)
    return folder


def both(start: Start, path: Path, extra: dict[str, Any], **engine: Any) -> tuple[Player, Player]:
    """With and without us, started together."""
    return start(None, path, **engine), start({"hicache_size": 0.1, **extra}, path, **engine)


def test_windows_beside_full_attention(start: Start, tmp_path: Path) -> None:
    """Two KV cache groups under vLLM's hybrid allocator; a window's host pages cover what a hit reads.

    Then our own engine and another process, which have only what the first one stored.
    """
    path = checkpoint(
        tmp_path / "gemma", "Gemma3", query_pre_attn_scalar=32, sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    prompts = [conversation(seed, 200 + 70 * seed) for seed in range(4)]
    extra = with_storage("file", file_storage_path=str(tmp_path / "pages"))
    engine = {"skip_tokenizer_init": True, "disable_hybrid_kv_cache_manager": False}
    plain, ours = both(start, path, extra, **engine)
    expected = plain.generate(prompts, max_tokens=40)
    assert_same(expected, ours.generate(prompts, max_tokens=40))
    ours.settle()
    again = ours.generate(prompts, max_tokens=40)
    assert cached(again) == sum((len(prompt) - 1) // 32 * 32 for prompt in prompts)
    assert_same(expected, again)
    longer = [prompt + answer["tokens"] for prompt, answer in zip(prompts, expected, strict=True)]
    assert_same(plain.generate(longer), ours.generate(longer))
    state = ours.state()
    assert len(state["groups"]) == 2 and state["load_async"] and state["load_failed"] == 0
    ours.stop()
    restarted = start(extra, path, **engine)
    hits, answers = reference_engine(
        path, tmp_path, prompts, name="tiny", page_size=32, swa_full_tokens_ratio=0.5
    )
    assert hits == [(len(prompt) - 1) // 32 * 32 for prompt in prompts]
    assert answers == [answer["tokens"][:8] for answer in expected]
    again = restarted.generate(prompts, max_tokens=40)
    assert cached(again) == sum(hits)
    assert_same(expected, again)
    assert_same(plain.generate(longer), restarted.generate(longer))
    state = restarted.state()
    assert state["fetch_read"] >= cached(again) // 32 and state["load_failed"] == 0
    restarted.ask("corrupt")  # positive control: these checks do see a wrong page
    assert not judge(expected, restarted.generate(prompts, max_tokens=40)).holds


def test_windows_in_several_groups(start: Start, tmp_path: Path) -> None:
    """More window layers than full ones: vLLM makes several groups of them, each with its pages in storage.

    A prompt that ends inside a stored one has full attention's pages on the host, and windows in storage.
    """
    path = checkpoint(
        tmp_path / "gemma", "Gemma3", query_pre_attn_scalar=32, sliding_window=64, num_hidden_layers=7,
        layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention"],
    )  # fmt: skip
    prompts = [conversation(seed, 200 + 70 * seed) for seed in range(3)]
    extra = with_storage("disk", disk_storage_path=str(tmp_path / "pages"), max_size="64MiB")
    engine = {"skip_tokenizer_init": True, "disable_hybrid_kv_cache_manager": False}
    plain, ours = both(start, path, extra, **engine)
    expected = plain.generate(prompts)
    assert_same(expected, ours.generate(prompts))
    assert len(ours.state()["groups"]) > 2
    ours.stop()
    restarted = start(extra, path, **engine)
    again = restarted.generate(prompts)
    assert cached(again) == sum((len(prompt) - 1) // 32 * 32 for prompt in prompts)
    assert_same(expected, again)
    before = restarted.state()
    short = [prompt[:140] for prompt in prompts]
    got = restarted.generate(short)
    assert cached(got) == 3 * 128
    assert_same(plain.generate(short), got)
    after = restarted.state()
    assert after["fetch_found"] == before["fetch_found"], "of full attention nothing is asked for"
    windows = 3 * 2 * (len(after["groups"]) - 1)
    assert 0 < after["read_pages"] - before["read_pages"] <= windows, "nor read"


def test_several_workers(start: Start, tmp_path: Path, model: Path) -> None:
    """Two tensor parallel ranks: each saves, stores and loads its own half."""
    keys = {
        "hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": {
            "file_storage_path": str(tmp_path / "pages"), "prefetch_threshold": 32, **PATIENT,
        },
        "drain_timeout_s": 60.0, "hicache_storage_identity": "tiny",
    }  # fmt: skip
    prompts = [conversation(seed, 300) for seed in range(3)]
    plain = start(None)
    expected = plain.generate(prompts)
    for kind, want in ((WarmPlayer, 0), (Player, 3 * 288)):
        bind = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        ours = start({"hicache_size": 0.05, **keys}, env=bind, kind=kind, tensor_parallel_size=2)
        answers = ours.generate(prompts)
        assert cached(answers) == want
        assert_same(expected, answers)
        ours.settle()
        assert cached(ours.generate(prompts)) == 3 * 288
        ours.stop()


def test_events_name_host_blocks_as_vllm_does(start: Start) -> None:
    """What enters and leaves the host, with the hashes vLLM's own events have."""
    ours = start(
        {"hicache_size": 0.002}, enable_prefix_caching=True, num_gpu_blocks_override=80,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    )  # fmt: skip
    ours.ask("listen")
    for seed in range(12):
        ours.generate([conversation(seed, 200)])
    events = ours.ask("heard")
    on_device = {name for event in events if event["medium"] == "GPU" for name in event["stored"]}
    stored = [name for event in events if event["medium"] == "CPU" for name in event["stored"]]
    removed = [name for event in events if event["medium"] == "CPU" for name in event["removed"]]
    assert stored and removed and set(stored) <= on_device and set(removed) < set(stored)
    figures = ours.ask("figures")
    assert figures["saved_pages"] == len(stored) and figures["write_through_bytes"] > 0


def test_a_real_model(start: Start, real_model: Path, plain_real: Player, tmp_path: Path) -> None:
    """SmolLM2-135M on conversations: the next turn begins where the last answer ended. Then on the server."""
    path, plain = real_model, plain_real
    ours = start({"hicache_size": 0.1}, path, **REAL)
    turns = [conversation(3, 300), conversation(4, 260)]
    for _ in range(2):
        expected = plain.generate(turns, max_tokens=24)
        got = ours.generate(turns, max_tokens=24)
        assert_same(expected, got)
        ours.settle()
        turns = [turn + answer["tokens"] + [17, 18, 19] * 8 for turn, answer in zip(turns, expected)]
    assert cached(got) >= sum((len(turn) - 24 - 24 - 32) // 32 * 32 for turn in turns) - 128
    assert ours.state()["load_failed"] == 0
    ours.stop()
    expected = plain.generate(turns, max_tokens=24)
    server = Serving(path, {"hicache_size": 0.2}, tmp_path / "server")
    try:
        server.wait()
        for want in (0, sum((len(turn) - 1) // 32 * 32 for turn in turns)):
            answers = [server.complete(turn, max_tokens=24) for turn in turns]
            judge(expected, [{"tokens": token_ids(answer)} for answer in answers]).assert_holds()
            assert sum(cached_tokens(answer) for answer in answers) == want
    finally:
        server.stop()
