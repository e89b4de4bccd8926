"""What holds for every model that mixes full attention with layers of another kind: windows, or states."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hiradix.apps.engine import Engine
from hiradix.memory import HostPool
from hiradix.storage.kit.seal import SEAL_BYTES
from hiradix.tree import Tier
from tests.engine.checkpoints import Reference, prompts
from tests.engine.configs import with_storage
from tests.engine.conftest import MakeEngine
from tests.engine.driving import assert_empty, assert_no_state_out, serve, tokens
from tests.engine.test_tiers import GREEDY, converse, settle


@dataclass(frozen=True)
class Mix:
    """A kind of layers beside full attention: engines for it, prompts that show its data, its idle check.

    lengths, long: of prompts; the last whole pages of the three end at 96, 128 and 72. A state is seen best
    in the token behind its record, so prompts for states end there.
    """

    judge: Reference
    make: MakeEngine
    assert_idle: Callable[[Engine], None]
    lengths: tuple[int, int, int]
    long: int


def spoil(array: torch.Tensor) -> None:
    array.normal_(generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["windows", "states"])
def mix(request: pytest.FixtureRequest) -> Mix:
    if request.param == "windows":
        judge, make = request.getfixturevalue("gemma"), request.getfixturevalue("make_hybrid")
        return Mix(judge, make, assert_empty, (100, 130, 75), 120)
    judge, make = request.getfixturevalue("lfm2"), request.getfixturevalue("make_recurrent")
    return Mix(judge, make, assert_no_state_out, (97, 129, 73), 121)


@pytest.mark.parametrize("policy", ["wait_complete", "best_effort", "timeout"])
def test_answers_do_not_depend_on_storage(policy: str, mix: Mix, tmp_path: Path) -> None:
    config = with_storage(tmp_path, "disk")
    engine = mix.make(cache=replace(config, hicache_storage_prefetch_policy=policy))
    identity, _ = converse(engine, mix.judge)
    identity.assert_holds()
    mix.assert_idle(engine)


@pytest.mark.parametrize(("backend", "eviction"), [("file", "ghd"), ("disk", "lru")])
@pytest.mark.parametrize(
    ("mix", "family"),
    [("windows", "gemma3"), ("windows", "qwen2-window"), ("states", "lfm2"), ("states", "qwen3-next")],
    indirect=["mix"],
)
def test_storage_serves_it_after_a_flush_and_in_another_engine(
    backend: str, eviction: str, mix: Mix, family: str, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Also where a policy that learns has the prompt's end wait for the answer's."""
    judge, asked = reference(family), prompts(mix.lengths, seed=2)
    config = replace(with_storage(tmp_path, backend), radix_eviction_policy=eviction)
    engine = mix.make(model_path=str(judge.path), cache=config)
    first = serve(engine, asked, GREEDY)
    judge.judge(asked, tokens(first)).assert_holds()
    settle(engine)
    assert engine.flush()
    for served in (engine, mix.make(model_path=str(judge.path), cache=config)):
        answers = serve(served, asked, GREEDY)
        judge.judge(asked, tokens(answers)).assert_holds()
        assert [answer.usage.cached_storage for answer in answers if answer.usage] == [96, 128, 72]
        settle(served)
        mix.assert_idle(served)


def test_storage_serves_nothing_to_other_weights(mix: Mix, tmp_path: Path) -> None:
    """Same name, shapes and folder of pages: only the weights say that the pages are not theirs."""
    own = mix.judge.path
    other = tmp_path / own.name
    shutil.copytree(own, other)
    file = other / "model.safetensors"
    save_file({name: values * 1.25 for name, values in load_file(file).items()}, file, {"format": "pt"})
    asked, config = prompts(mix.lengths[:2], seed=4), with_storage(tmp_path, "file")
    first = mix.make(cache=config)
    serve(first, asked, GREEDY)
    settle(first)
    second = mix.make(model_path=str(other), cache=config)
    assert second.model_name == first.model_name
    answers = serve(second, asked, GREEDY)
    Reference.load(other).judge(asked, tokens(answers)).assert_holds()
    assert [answer.usage.cached_storage for answer in answers if answer.usage] == [0, 0]


@pytest.mark.parametrize("component", [0, 1])
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_corrupted_page_from_storage_is_seen(
    component: int, is_checked: bool, mix: Mix, tmp_path: Path
) -> None:
    """Damaged files are misses; with the checks off the answer goes wrong, so these pages are read."""
    asked = prompts([mix.long], seed=3)
    config = with_storage(tmp_path, "file")
    extra = config.hicache_storage_backend_extra_config.with_backend(checksum=is_checked)
    engine = mix.make(cache=replace(config, hicache_storage_backend_extra_config=extra))
    serve(engine, asked, GREEDY)
    settle(engine)
    part = engine.cache.attached.storage.guards[component]  # type: ignore[attr-defined]
    for path in (tmp_path / "file" / part.backend.inner._folder.namespace).rglob("*.page"):
        data = bytearray(path.read_bytes())
        junk = torch.empty((len(data) - SEAL_BYTES) // 4)
        spoil(junk)
        data[SEAL_BYTES:] = junk.numpy().tobytes()
        path.write_bytes(data)
    assert engine.flush()
    [answer] = serve(engine, asked, GREEDY)
    assert answer.usage is not None and (answer.usage.cached_storage == 0) == is_checked
    assert mix.judge.judge(asked, [answer.token_ids]).holds == is_checked


@pytest.mark.parametrize("component", [0, 1])
def test_identity_rule_goes_red_on_corrupted_host_pages(
    component: int, mix: Mix, host_pools: list[HostPool]
) -> None:
    """The positive control, for full pages and for what else came back from the host."""
    engine = mix.make()
    asked = prompts(mix.lengths[:1], seed=2)
    assert mix.judge.judge(asked, tokens(serve(engine, asked, GREEDY))).holds
    settle(engine)
    serve(engine, prompts([170, 170], seed=5), GREEDY)
    settle(engine)
    for page in engine.cache.tree.all_pages(Tier.HOST, component).tolist():
        for view in host_pools[component].page_views(page):
            spoil(torch.frombuffer(view, dtype=torch.float32))
    [answer] = serve(engine, asked, GREEDY)
    assert answer.usage is not None and answer.usage.cached_host > 0
    assert not mix.judge.judge(asked, [answer.token_ids]).holds
