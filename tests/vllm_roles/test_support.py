"""What is said where vLLM is another one than was tested, or none, without vLLM."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

import hiradix.adapters.vllm
from hiradix.adapters.vllm.support import refuse_options, warn_if_untested
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
        model_config=SimpleNamespace(is_prefix_caching_supported=True),
    )


def caches(is_mixed: bool = False, **spec: bool) -> SimpleNamespace:
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(**spec))
    return SimpleNamespace(has_mixed_precision_kv_cache=is_mixed, kv_cache_groups=[group])


@pytest.mark.parametrize(
    ("name", "value"), [("decode_context_parallel_size", 2), ("prefill_context_parallel_size", 4)]
)
def test_context_parallel_ranks_are_refused(name: str, value: int) -> None:
    """Their blocks hold a share of so many times the tokens: pages would be named by the first of them."""
    refuse_options(config(), caches())
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} {value}: not supported"):
        refuse_options(config(**{name: value}), caches())


def test_blocks_that_are_zeroed_before_the_connector_is_asked_are_refused() -> None:
    with pytest.raises(ConfigError, match="^--kv-cache-dtype: .*different precisions"):
        refuse_options(config(), caches(is_mixed=True))


def test_models_for_which_vllm_has_no_prefix_cache_are_refused() -> None:
    """As a pooling model that takes the mean of all tokens: of a hit it would see the rest alone. Or one
    whose layers look ahead: its KV of a prefix is another with each continuation."""
    pooling = config()
    pooling.model_config.is_prefix_caching_supported = False
    refuse_options(config(), caches(non_causal=False))
    for asked, kv_caches in ((pooling, caches()), (config(), caches(non_causal=True))):
        with pytest.raises(ConfigError, match="^--model: no prefix"):
            refuse_options(asked, kv_caches)
