"""Inside SGLang only requests compute: what storage has is compared with that before it is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hiradix.adapters.sglang.lora_adapters import LoraAdapters
from hiradix.adapters.sglang.weights import Weights
from hiradix.config import parse_extra_config
from tests.sglang.rig import Rig, stored_in
from tests.sglang.test_named_after_upstream import PROMPT

WHOLE = len(PROMPT)


class Model(Rig):
    """A rig whose model computes other KV than the other rigs' do."""

    weights = 1.0

    def fill(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        super().fill(slots, values * self.weights)


def model(folder: Path, weights: float, **flags: Any) -> Model:
    made = Model(folder, **flags)
    made.weights = weights
    return made


def served(rig: Rig, **space: str) -> int:
    """Tokens of a prompt that storage serves; what it does not is computed and stored."""
    handle = rig.prefetch(rig.request(PROMPT + [1], **space))
    rig.settle()
    assert rig.cache.check_prefetch_progress(handle)
    num_tokens = int(rig.cache.pop_prefetch_loaded_span(handle)[0])
    rig.run(PROMPT + [1], **space)
    rig.settle()
    rig.cache.reset()
    rig.check()
    return num_tokens


def test_the_first_hit_is_computed_once_and_never_one_of_other_weights(tmp_path: Path) -> None:
    for weights, found in ((1.0, [0, WHOLE]), (1.0, [0, WHOLE]), (1.5, [0, WHOLE]), (1.0, [0, WHOLE])):
        rig = model(tmp_path, weights)
        assert [served(rig), served(rig)] == found
        figures = rig.cache.inner.stats().storage
        assert figures["canary_adopted"] + figures["canary_own"] == 1
        rig.cache.release_host_resources()


def test_names_alone_would_have_served_the_pages_of_other_weights(tmp_path: Path) -> None:
    """The positive control."""
    by_names = {"hicache_storage_identity": "same"}
    assert served(model(tmp_path, 1.0, **by_names)) == 0
    assert served(model(tmp_path, 1.5, **by_names)) == WHOLE


def test_what_is_stored_is_compared_again_after_a_change_of_weights(tmp_path: Path) -> None:
    """That the first ones are back is told by samples; what is stored of them has to agree all the same."""
    rig, layer = model(tmp_path, 1.0), torch.nn.Linear(8, 8)
    rig.cache.watch(Weights(layer), parse_extra_config(stored_in(tmp_path)))
    assert [served(rig), served(rig)] == [0, WHOLE]
    for factor, weights, found in ((2.0, 2.0, [0, WHOLE]), (0.5, 1.0, [0, WHOLE]), (2.0, 3.0, [0, WHOLE])):
        with torch.no_grad():
            layer.weight.mul_(factor)
        rig.weights = weights
        rig.cache.reset()
        assert [served(rig), served(rig)] == found
    rig.cache.release_host_resources()


@pytest.mark.parametrize("key", ["0f" * 16, "tenant" + "0f" * 16])
def test_adapters_given_at_start_are_told_from_the_model(key: str) -> None:
    adapters = LoraAdapters({"0f" * 16: "digest"}, frozenset({"0f" * 16}))
    assert adapters.of(key) == adapters.of(adapters.named(key)) == "0f" * 16
    assert [adapters.of(other) for other in (None, "", "tenant", "ab" * 16)] == ["", "", "", ""]


def test_what_waits_while_the_first_is_compared_is_served(tmp_path: Path) -> None:
    """All are asked for before anything could be compared, and storage had to leave them unserved."""
    prompts = [[token + number for token in PROMPT] for number in (0, 1000, 2000)]
    first = model(tmp_path, 1.0)
    for prompt in prompts:
        first.run(prompt + [1])
    first.settle()
    first.cache.release_host_resources()
    for weights, brought in ((1.5, 0), (1.0, WHOLE)):
        again = model(tmp_path, weights)
        handles = [again.prefetch(again.request(prompt + [1])) for prompt in prompts]
        again.settle()
        for handle in handles:
            assert again.cache.check_prefetch_progress(handle)
            assert again.cache.pop_prefetch_loaded_span(handle)[0] == 0
        again.run(prompts[0] + [1])
        again.settle()
        for handle in handles[1:]:
            assert again.cache.check_prefetch_progress(handle) == (not brought)
        again.settle()
        for handle in handles[1:]:
            assert again.cache.check_prefetch_progress(handle)
            assert again.cache.pop_prefetch_loaded_span(handle)[0] == brought
        for handle in handles:
            again.cache.release_aborted_request(handle)
        again.settle()
        again.cache.reset()
        again.check()
        again.cache.release_host_resources()
