"""What is said where vLLM is another one than was tested, or none, without vLLM."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

import hiradix.adapters.vllm
from hiradix.adapters.vllm.support import (
    is_zeroed_early,
    refuse_options,
    refuse_write_back,
    roles_of,
    warn_if_untested,
)
from hiradix.errors import ConfigError


@pytest.mark.parametrize(
    ("version", "num_told"),
    [
        ("0.32.0", 0),
        ("0.32.1+cpu", 0),
        ("0.32.0rc1", 1),
        ("0.32.1.dev7+g01ab.cpu", 1),
        ("0.31.4", 1),
        ("0.33.0", 1),
        ("of unknown version", 1),
    ],
)
def test_a_vllm_that_nobody_tested_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, num_told: int
) -> None:
    monkeypatch.setattr("hiradix.adapters.vllm.support.installed_version", lambda: version)
    warn_if_untested()
    assert [version in record.getMessage() for record in caplog.records] == [True] * num_told


@pytest.mark.parametrize("lacks", ["vllm", "vllm.config"])
def test_a_vllm_without_what_is_imported_is_named(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    """As an older one, whose connectors' base class is elsewhere or gives other things."""
    monkeypatch.delitem(sys.modules, "hiradix.adapters.vllm.connector", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, lacks, None)
    monkeypatch.setattr("hiradix.adapters.vllm.support.installed_version", lambda: "0.9.1")
    with pytest.raises(ConfigError, match=r"vLLM 0\.9\.1 is not supported: .*vllm.*Tested with vLLM 0\.32"):
        _ = hiradix.adapters.vllm.HiRadixConnector


def test_a_vllm_that_lacks_what_is_used_is_refused_by_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = ("there is no Call", "x is other")
    monkeypatch.setattr("hiradix.adapters.vllm.support.lacking", lambda read: pieces)
    monkeypatch.setattr("hiradix.adapters.vllm.support.installed_version", lambda: "0.31.0+cpu")
    said = r"vLLM 0\.31\.0\+cpu is not supported: there is no Call; x is other\."
    with pytest.raises(ConfigError, match=said):
        _ = hiradix.adapters.vllm.HiRadixConnector


def config(**sizes: int) -> SimpleNamespace:
    """vLLM's configuration of a model for which its own prefix cache is right."""
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, **sizes}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(use_replayssm=False),
        model_config=SimpleNamespace(is_prefix_caching_supported=True),
    )


def caches(**spec: bool) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(**spec))])


@pytest.mark.parametrize(
    ("name", "value"), [("decode_context_parallel_size", 2), ("prefill_context_parallel_size", 4)]
)
def test_context_parallel_ranks_are_refused(name: str, value: int) -> None:
    """Their blocks hold a share of so many times the tokens: pages would be named by the first of them."""
    refuse_options(config(), caches())
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} {value}: not supported"):
        refuse_options(config(**{name: value}), caches())


@pytest.mark.parametrize("is_second", [True, False])
def test_steps_wait_for_their_copies_where_vllm_zeroes_blocks_first(is_second: bool) -> None:
    """In its second model runner, before the connector is asked to wait for the copies that still read them;
    and under write_back what it evicts would be zeros."""
    asked = SimpleNamespace(use_v2_model_runner=is_second)
    zeroed = SimpleNamespace(needs_kv_cache_zeroing=True, has_mamba_layers=False)
    assert is_zeroed_early(asked, zeroed) is is_second
    assert not is_zeroed_early(asked, SimpleNamespace(needs_kv_cache_zeroing=False))
    refuse_write_back(asked, SimpleNamespace(needs_kv_cache_zeroing=False))
    for kv_caches in (zeroed,) if is_second else ():
        with pytest.raises(ConfigError, match="write_back with KV caches of different precisions"):
            refuse_write_back(asked, kv_caches)
    with pytest.raises(ConfigError, match="write_back with recurrent states"):
        refuse_write_back(asked, SimpleNamespace(needs_kv_cache_zeroing=True, has_mamba_layers=True))


def test_a_state_with_a_history_outside_its_block_is_refused() -> None:
    asked = config()
    asked.cache_config.use_replayssm = True
    with pytest.raises(ConfigError, match="^--use-replayssm"):
        refuse_options(asked, caches())


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("loads", [True, False])
def test_the_role_says_who_saves_and_who_loads(saves: bool, loads: bool) -> None:
    assert roles_of(SimpleNamespace(is_kv_producer=saves, is_kv_consumer=loads)) == (saves, loads)


def test_models_for_which_vllm_has_no_prefix_cache_are_refused() -> None:
    """As a pooling model that takes the mean of all tokens: of a hit it would see the rest alone. Or one
    whose layers look ahead: its KV of a prefix is another with each continuation."""
    pooling = config()
    pooling.model_config.is_prefix_caching_supported = False
    refuse_options(config(), caches(non_causal=False))
    for asked, kv_caches in ((pooling, caches()), (config(), caches(non_causal=True))):
        with pytest.raises(ConfigError, match="^--model: no prefix"):
            refuse_options(asked, kv_caches)
