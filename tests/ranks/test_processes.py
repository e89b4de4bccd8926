"""Tensor parallel ranks as real processes over gloo: one answer, whatever is cached, and whoever fails.

The model is a seeded Llama of 8 query and 4 KV heads. HIRADIX_RANKS_FULL=1 (make test-faults) adds a rank
that hangs, and SmolLM2-135M on three ranks.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.checkpoints import CONTEXT, VOCAB, Reference, write_checkpoint
from tests.identity import Identity
from tests.ranks.scenario import NUM_NEW, Plan, start
from tests.seeded_model import seeded_model

DEADLINE_S = 400.0
FULL = pytest.mark.skipif(os.environ.get("HIRADIX_RANKS_FULL") != "1", reason="HIRADIX_RANKS_FULL=1 runs it")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "llama"
    made = seeded_model(
        "Llama", 8, vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=CONTEXT,
        bos_token_id=None, eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    made.generation_config.pad_token_id = 0
    made.save_pretrained(folder)
    return folder


def play(plan: Plan, deadline_s: float = DEADLINE_S) -> tuple[list[dict[str, Any] | None], list[int | None]]:
    """What each rank saw (None where it wrote nothing) and how it ended; all within the deadline."""
    ranks = start(plan)
    end = time.monotonic() + deadline_s
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    files = [plan.folder / f"rank-{rank}.json" for rank in range(plan.size)]
    seen = [json.loads(file.read_text()) if file.exists() else None for file in files]
    assert None not in codes, f"ranks that did not end: {codes}, {seen}"
    return seen, codes


def judge(reference: Reference, turns: list[dict[str, Any]]) -> Identity:
    identity = Identity()
    for turn in turns:
        for prompt, answer in zip(turn["prompts"], turn["answers"], strict=True):
            assert len(answer) == NUM_NEW
            identity.compare(prompt, reference.answer(prompt, NUM_NEW), answer, reference.logprobs_after)
    return identity


def same_everywhere(seen: list[dict[str, Any] | None]) -> dict[str, Any]:
    assert seen[0] is not None and "error" not in seen[0], seen
    assert all(one == seen[0] for one in seen), "the ranks' answers differ"
    return seen[0]


@pytest.mark.long(10)
@pytest.mark.timeout(450)
def test_two_ranks_answer_as_one(model: Path, tmp_path: Path) -> None:
    phases = ("corrupted", "converse", "from_storage", "one_bad_backend", "attach_on_one_rank_only")
    seen, codes = play(Plan(model, tmp_path, 2, phases))
    if seen[0] is not None and seen[1] is not None:
        refusals = [one["attach_on_one_rank_only"].pop() for one in seen if one is not None]
        assert "another rank" in refusals[0] and "blocked" in refusals[1], refusals
    said, reference = same_everywhere(seen), Reference.load(model)
    assert codes == [0, 0]
    judge(reference, said["corrupted"][:1]).assert_holds()
    assert not judge(reference, said["corrupted"][1:]).holds, "spoilt keys on one rank change nothing"
    for phase in ("converse", "from_storage", "one_bad_backend"):
        judge(reference, said[phase]).assert_holds()
    device, host, _ = (sum(turn["cached"][at] for turn in said["converse"]) for at in range(3))
    assert device > 0 and host > 0
    assert said["from_storage"][0]["cached"][2] > 0
    assert said["attach_on_one_rank_only"] == [[True, "Detached HiCache storage backend successfully."],
                                               False, False, False, True, True]  # fmt: skip


KINDS = {
    "lfm2": {"max_mamba_cache_size": 24, "max_running_requests": 4},
    "qwen3-next-moe": {"max_mamba_cache_size": 24, "max_running_requests": 4},
    "qwen3.5": {"max_mamba_cache_size": 24, "max_running_requests": 4},
    "bamba": {"max_mamba_cache_size": 24, "max_running_requests": 4},
    "gemma3": {"swa_full_tokens_ratio": 0.5},
}


@pytest.mark.long(20)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", KINDS)
def test_two_ranks_with_a_share_of_each_state_or_window(family: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_checkpoint(family, path)
    phases = ("converse", "from_storage", "one_bad_copy", "one_bad_backend")
    seen, codes = play(Plan(path, tmp_path, 2, phases, engine=KINDS[family]))
    said, reference = same_everywhere(seen), Reference.load(path)
    assert codes == [0, 0]
    for phase in phases:
        judge(reference, said[phase]).assert_holds()
    device, host, _ = (sum(turn["cached"][at] for turn in said["converse"]) for at in range(3))
    assert device > 0 and host > 0
    assert said["from_storage"][0]["cached"][2] > 0


@pytest.mark.long(10)
@pytest.mark.timeout(450)
def test_four_ranks_answer_as_one_until_one_is_killed(model: Path, tmp_path: Path) -> None:
    seen, codes = play(Plan(model, tmp_path, 4, ("converse", "from_storage", "killed")))
    assert codes == [0, -9, 0, 0] and seen[1] is None
    for one in (seen[0], seen[2], seen[3]):
        assert one is not None
        error = one.pop("error")
        assert error["type"] == "RankLost" and "a rank died" in error["text"] and error["s"] < 55.0, error
    said, reference = same_everywhere([seen[0], seen[2], seen[3]]), Reference.load(model)
    judge(reference, said["converse"] + said["from_storage"]).assert_holds()
    assert said["from_storage"][0]["cached"][2] > 0


@pytest.mark.timeout(450)
def test_an_attach_that_hangs_on_one_rank_is_refused_on_all(model: Path, tmp_path: Path) -> None:
    seen, codes = play(Plan(model, tmp_path, 2, ("attach_that_hangs_on_one_rank",)))
    assert codes == [0, 0], seen
    mine, other = (one["attach_that_hangs_on_one_rank"] for one in seen if one is not None)
    assert mine[:-1] == other[:-1] == [True, False, False, True, True]
    assert "another rank" in mine[-1] and "not open within 0.5 s" in other[-1]


@pytest.mark.long(25)
@FULL
def test_a_hanging_rank_is_noticed_within_the_deadline(model: Path, tmp_path: Path) -> None:
    """The deadline is also that for meeting at the start, which takes a busy machine some seconds."""
    seen, _ = play(Plan(model, tmp_path, 2, ("hanging",), timeout_s=20.0))
    assert seen[0] is not None and seen[0]["error"]["type"] == "RankLost"
    assert seen[0]["error"]["s"] < 60.0


@pytest.mark.long(30)
@FULL
@pytest.mark.timeout(600)
def test_smollm2_on_three_ranks(tmp_path: Path) -> None:
    from hiradix.apps.engine.smollm2 import smollm2_path

    model = smollm2_path(dtype="float32")
    seen, codes = play(Plan(model, tmp_path, 3, ("converse", "from_storage"), device_tokens=1024), 540.0)
    said, reference = same_everywhere(seen), Reference.load(model)
    assert codes == [0] * 3
    judge(reference, said["converse"] + said["from_storage"]).assert_holds()
    assert said["from_storage"][0]["cached"][2] > 0
