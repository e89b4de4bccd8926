"""What is said where vLLM is another one than was tested, or none, without vLLM."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import hiradix.adapters.vllm
from hiradix.adapters.vllm.support import warn_if_untested
from hiradix.errors import ConfigError


@pytest.mark.parametrize(
    ("version", "num_told"),
    [("0.32.0", 0), ("0.32.1+cpu", 0), ("0.31.4", 1), ("0.33.0", 1), ("of unknown version", 1)],
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
