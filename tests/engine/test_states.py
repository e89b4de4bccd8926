"""Models whose layers are partly recurrent: a record of their states wherever a match may end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hiradix.apps.engine import SamplingParams
from hiradix.prefix_cache import MatchPrefixParams
from hiradix.storage import ComponentPages, Stores, open_stores
from hiradix.tree import RadixKey
from tests.engine.checkpoints import Reference, prompts
from tests.engine.configs import CONFIGS, DEVICE_ONLY, TIERED, with_storage
from tests.engine.conftest import MakeEngine
from tests.engine.driving import assert_no_state_out, serve, tokens
from tests.engine.test_mixed import spoil
from tests.engine.test_tiers import GREEDY, converse, served_from, settle

FAMILIES = ["lfm2", "qwen3-next"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CONFIGS)
def test_answers_do_not_depend_on_the_cache(
    family: str, name: str, reference: Callable[[str], Reference], make_recurrent: MakeEngine
) -> None:
    judge = reference(family)
    engine = make_recurrent(model_path=str(judge.path), cache=CONFIGS[name])
    identity, answers = converse(engine, judge, num_turns=4 if family == "lfm2" else 3)
    identity.assert_holds()
    assert_no_state_out(engine)
    used = served_from(answers)
    assert (used["device"] > 0) == (name != "off"), used
    if name != "small_host":
        assert (used["host"] > 0) == (name not in ("off", "device")), used


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_token_behind_each_record(
    family: str, name: str, reference: Callable[[str], Reference], make_recurrent: MakeEngine
) -> None:
    """A state is seen best in the token that follows it: prompts that end one token behind each record."""
    judge = reference(family)
    engine = make_recurrent(model_path=str(judge.path), cache=CONFIGS[name], chunked_prefill_size=24)
    asked = prompts([101, 54, 77], seed=13)
    answers = serve(engine, asked, SamplingParams(max_new_tokens=20))
    settle(engine)
    whole = [prompt + answer.token_ids for prompt, answer in zip(asked, answers, strict=True)]
    serve(engine, prompts([150], seed=14), GREEDY)
    ends = [24, 48, 72, 96, 112] if name != "off" else [24, 96]
    for end in ends:
        again = [known[: end + 1] for known in whole if len(known) > end]
        judge.judge(again, tokens(serve(engine, again, GREEDY))).assert_holds()
        settle(engine)
    assert_no_state_out(engine)


@pytest.mark.parametrize("family", ["lfm2-moe", "qwen3-next-moe", "qwen3.5", "bamba", "granite"])
def test_other_families_through_all_tiers(
    family: str, reference: Callable[[str], Reference], make_recurrent: MakeEngine, tmp_path: Path
) -> None:
    judge = reference(family)
    settings = {"model_path": str(judge.path), "cache": with_storage(tmp_path, "file")}
    engine = make_recurrent(**settings)
    identity, answers = converse(engine, judge, num_turns=2)
    identity.assert_holds()
    assert served_from(answers)["host"] > 0
    asked = prompts([97, 73], seed=2)
    serve(engine, asked, GREEDY)
    settle(engine)
    again = serve(make_recurrent(**settings), asked, GREEDY)
    assert [answer.usage.cached_storage for answer in again if answer.usage] == [96, 72]
    judge.judge(asked, tokens(again)).assert_holds()


OPTIONS: dict[str, dict[str, Any]] = {
    "layout": {"hicache_mem_layout": "page_first_direct"},
    "selective": {"hicache_write_policy": "write_through_selective"},
    "ghd": {"radix_eviction_policy": "ghd"},
    "no_regret": {"hicache_no_regret": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_other_options(name: str, lfm2: Reference, make_recurrent: MakeEngine) -> None:
    engine = make_recurrent(cache=replace(TIERED, **OPTIONS[name]))
    identity, answers = converse(engine, lfm2, num_turns=3)
    identity.assert_holds()
    used = served_from(answers)
    assert used["device"] + used["host"] > 0
    assert_no_state_out(engine)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_page_sizes(
    family: str, page_size: int, reference: Callable[[str], Reference], make_recurrent: MakeEngine
) -> None:
    judge = reference(family)
    engine = make_recurrent(model_path=str(judge.path), cache=replace(TIERED, page_size=page_size))
    identity, answers = converse(engine, judge, num_turns=2)
    identity.assert_holds()
    assert served_from(answers)["device"] + served_from(answers)["host"] > 0


def test_what_storage_is_told_of_records(
    make_recurrent: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names are those of pages of 8 tokens, and what their bytes are differs with each type."""
    told: list[ComponentPages] = []

    def tell(name: str, keys: Any, pages: list[ComponentPages], required: bool) -> Stores:
        told.extend(pages)
        return open_stores(name, keys, pages, required=required)

    monkeypatch.setattr("hiradix.prefix_cache.lower_tiers.open_stores", tell)
    for dtype in ("float32", "bfloat16", "float16"):
        make_recurrent(cache=with_storage(tmp_path, "file"), dtype=dtype)
    marks = [pages.fingerprint for pages in told]
    assert [mark.component for mark in marks] == ["", "state"] * 3
    assert {mark.page_size for mark in marks} == {8} and len({mark.digest() for mark in marks}) == 6


@pytest.mark.parametrize("family", FAMILIES)
def test_identity_rule_goes_red_on_one_corrupted_device_record(
    family: str, reference: Callable[[str], Reference], make_recurrent: MakeEngine
) -> None:
    """The positive control, for each array of a record: one record wrong, all pages right."""
    judge, asked = reference(family), prompts([97], seed=2)
    arrays = ["conv"] if family == "lfm2" else ["conv", "ssm"]
    for name in arrays:
        engine = make_recurrent(model_path=str(judge.path), cache=DEVICE_ONLY)
        assert judge.judge(asked, tokens(serve(engine, asked, GREEDY))).holds
        match = engine.cache.match_prefix(MatchPrefixParams(RadixKey(asked[0])))
        assert len(match.device_indices) == 96
        cache: Any = engine.cache
        hybrid: Any = engine._pools.hybrid
        for layer in hybrid.other.array(name):
            spoil(layer[cache.record(match.last_device_node)])
        assert not judge.judge(asked, tokens(serve(engine, asked, GREEDY))).holds
