"""What an engine's own configuration does not say of us, variables and a file do: inside vLLM and SGLang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hiradix.adapters.sglang import settings as sglang_settings
from hiradix.adapters.vllm.settings import parse_settings
from hiradix.config import ExtraConfig, HiCacheConfig
from hiradix.errors import ConfigError
from hiradix.intents.limits import IntentLimits

FILE = """
port = 30000                  # of hiradix serve
page_size = 64                # vLLM's own
hicache_size = 3
hicache_no_regret = false
load_mode = "async"
attach_allow = ["backend=disk,path=/file"]
hicache_storage_backend = "disk"
[hicache_storage_backend_extra_config]
max_size = "9GiB"
[attachable.cold]
backend = "file"
file_storage_path = "/cold"
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "shared.toml"
    path.write_text(FILE)
    return str(path)


def test_vllms_mapping_counts_then_variables_then_the_file(file: str) -> None:
    environment = {"HIRADIX_CONFIG": file, "HIRADIX_LOAD_MODE": "sync", "HIRADIX_HICACHE_SIZE": "2"}
    found = parse_settings({"hicache_size": 1}, 16, environment)
    assert (found.cache.hicache_size, found.load_mode) == (1, "sync")
    assert not found.cache.is_no_regret and found.cache.page_size == 16
    assert found.cache.hicache_storage_backend == "disk"
    assert found.cache.hicache_storage_backend_extra_config.backend["max_size"] == "9GiB"
    assert set(found.attach_rules.prepared) == {"default", "cold"}
    assert found.attach_rules.rules[0].folders == ("/file",)
    named = parse_settings({"config": file, "attach_allow": []}, 16, {})
    assert (named.cache.hicache_size, named.load_mode, named.attach_rules.rules) == (3, "async", ())


def test_the_same_said_by_each_source_makes_the_same_connector(tmp_path: Path) -> None:
    values = {
        "hicache_size": 2.5, "hicache_no_regret": "off", "load_mode": "sync", "drain_timeout_s": 3.0,
        "admin_port": 0, "admin_api_key": "k1", "storage_after_reset": "same", "schedule_policy": "lpm",
        "attach_allow": ["backend=disk,path=/a"], "hicache_storage_backend": "disk",
        "hicache_storage_required": True, "radix_eviction_policy": "lru", "served_model_name": "m",
        "hicache_storage_backend_extra_config": {"max_size": "9GiB"},
        "attachable": {"cold": {"backend": "file", "file_storage_path": "/c"}},
        "intent_host_share": 0.5, "intent_tenant_bytes": "64MiB", "intent_max_open": 9,
    }  # fmt: skip
    path = tmp_path / "all.json"
    path.write_text(json.dumps(values))
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    texts["attach_allow"] = "backend=disk,path=/a"
    by_mapping = parse_settings(values, 16, {})
    by_variables = parse_settings({}, 16, {f"HIRADIX_{name.upper()}": text for name, text in texts.items()})
    assert by_mapping == by_variables == parse_settings({}, 16, {"HIRADIX_CONFIG": str(path)})
    assert "k1" not in repr(by_mapping)
    assert by_mapping.intents == IntentLimits(host_share=0.5, tenant_bytes=64 << 20, max_open=9)


@pytest.mark.parametrize(
    ("values", "environment", "message"),
    [
        ({"hicache_sise": 1}, {},
         "kv_connector_extra_config: unknown key 'hicache_sise'; did you mean hicache_size?"),
        ({}, {"HIRADIX_LOAD_MOD": "x"},
         "HIRADIX_LOAD_MOD is no variable of hiradix; did you mean HIRADIX_LOAD_MODE?"),
        ({}, {"HIRADIX_LOAD_MODE": "x"},
         "HIRADIX_LOAD_MODE: unknown value 'x', expected one of auto, sync, async"),
        ({}, {"HIRADIX_ADMIN_API_KEY": " "}, "HIRADIX_ADMIN_API_KEY is empty: unset it, or give a value"),
        ({"config": "/none.toml"}, {}, "config: cannot read /none.toml"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(values: dict[str, str], environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(values, 16, environment)
    assert str(caught.value).startswith(message)


def test_inside_sglang_they_say_what_it_has_no_flag_for(file: str) -> None:
    environment = {"HIRADIX_CONFIG": file, "HIRADIX_ATTACH_ALLOW": "backend=disk,path=/v"}
    found = sglang_settings.own_settings(environment)
    assert found["hicache_no_regret"] == "off" and found["attach_allow"] == ("backend=disk,path=/v",)
    assert set(found["attachable"]) == {"cold"} and found["hicache_storage_identity"] is None
    assert any("hicache_size is for SGLang's own flag" in note for note in found.notes)
    assert sglang_settings.intent_limits({"HIRADIX_INTENT_MAX_TTL_S": "60"}) == IntentLimits(max_ttl_s=60.0)


def test_a_variable_that_sglang_reads_is_not_called_unread() -> None:
    assert sglang_settings.own_settings({"HIRADIX_ADMIN_PORT": "1"}).notes == ()


@pytest.mark.parametrize(("flag", "inside", "expected"), [
    (True, None, True), (False, None, False), (True, "off", False), (False, "on", True),
])  # fmt: skip
def test_no_regret_inside_the_extra_config_counts(flag: bool, inside: str | None, expected: bool) -> None:
    extra = ExtraConfig.from_mapping({} if inside is None else {"hicache_no_regret": inside})
    config = HiCacheConfig(hicache_no_regret=flag, hicache_storage_backend_extra_config=extra)
    assert config.is_no_regret == expected
    assert "hicache_no_regret" not in extra.backend
