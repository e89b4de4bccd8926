"""Settings as records: how a mapping is read into a configuration, and that a store's keys are read once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hiradix.config import ExtraConfig, HiCacheConfig
from hiradix.errors import ConfigError
from hiradix.settings import (
    REQUIRED,
    Setting,
    Type,
    group,
    read,
    setting,
    settings_of,
    shown_default,
    shown_values,
)
from hiradix.storage import StoreSettings, Trust, open_stores, trust_of
from hiradix.storage.backends.nixl.config import NixlConfig
from hiradix.storage.backends.s3.config import S3Config
from hiradix.storage.backends.tier.backend import TierConfig
from hiradix.storage.fingerprint import PageFingerprint
from hiradix.storage.protocol import StorageContext
from tests.storage.test_components import BOTH


@dataclass(frozen=True)
class Inner:
    wait_s: float = setting("wait_s", Type.SECONDS, 2.0, "a wait", minimum=0.5)


@dataclass(frozen=True)
class Outer:
    address: str = setting("address", Type.ADDRESS, REQUIRED, "where it is")
    num_bytes: int = setting("size", Type.SIZE, 8 << 20, "how large it is")
    is_on: bool = setting("mode", Type.TEXT, "on", "whether it is on", choices=("on", "off"), to="on".__eq__)
    extras: Mapping[str, Any] = setting("extras", Type.OBJECT, dict, "anything")
    key: str = setting("api_key", Type.SECRET, "", "the key")
    inner: Inner = group(Inner)
    derived: int = 3


def refused(values: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read(Outer, values, "here: {}".format)
    return str(caught.value)


def test_what_is_not_given_is_the_default() -> None:
    made = read(Outer, {"address": "a", "size": None, "unknown": 1}, str)
    assert made == Outer("a", 8 << 20, True, {}, "", Inner(2.0))
    values = {"address": "a", "size": "1KiB", "mode": "off", "extras": {"b": 1}, "wait_s": 3}
    made = read(Outer, values, str)
    assert made == Outer("a", 1024, False, {"b": 1}, "", Inner(3.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "here: address must be text, got None"),
        ({"size": "1 parsec"}, "here: size: expected bytes"),
        ({"size": 1 << 63}, "here: size: 9223372036854775808 is too large"),
        ({"mode": "maybe"}, "here: mode: unknown value 'maybe', expected one of on, off"),
        ({"extras": []}, "here: extras must be an object, got list"),
        ({"wait_s": 0.1}, "here: wait_s must be a finite number >= 0.5, got 0.1"),
        ({"wait_s": 1e10}, "here: wait_s must be at most 1e+09"),
        ({"api_key": 271828}, "here: api_key must be text, got '***'"),
    ],
)
def test_a_bad_value_is_named(values: dict[str, Any], message: str) -> None:
    assert refused({"address": "a"} | values if values else values).startswith(message)


def test_secrets_are_in_no_repr_and_have_names_that_logs_hide() -> None:
    assert "hunter2" not in repr(Outer("a", key="hunter2"))
    with pytest.raises(ValueError, match="motto"):
        Setting("motto", Type.SECRET, "", "would be shown")


OF_OTHERS: dict[str, object] = {
    "an object of a setting": Outer("a", extras={"password": "hunter2"}),
    "obstore's settings": S3Config.from_mapping(
        {"url": "s3://bucket/pages", "store_options": {"aws_secret_access_key": "hunter2"}}
    ),
    "a plugin's parameters": NixlConfig.from_mapping({"plugin_options": {"secret_key": "hunter2"}}),
    "keys of the store behind nixl": NixlConfig.from_mapping({"secret_access_key": "hunter2"}),
    "halves of a tier": TierConfig({"backend": "redis", "password": "hunter2"}, {"token": "hunter2"}),
    "a backend's own keys": StoreSettings.read({"password": "hunter2"}),
    "the extra config": HiCacheConfig(
        hicache_storage_backend_extra_config=ExtraConfig.from_mapping({"password": "hunter2"})
    ),
    "what a backend is made from": StorageContext(PageFingerprint("m"), {"password": "hunter2"}, 1),
    "the extra config by itself": ExtraConfig.from_mapping({"password": "hunter2"}),
}


@pytest.mark.parametrize("config", OF_OTHERS.values(), ids=OF_OTHERS)
def test_keys_that_somebody_else_reads_are_in_no_repr(config: object) -> None:
    """Which of them are secrets is not known here."""
    assert "hunter2" not in repr(config)


def test_an_error_about_a_plugins_parameters_shows_no_others() -> None:
    with pytest.raises(ConfigError, match="plugin_options must be an object of texts, got 7 for depth") as e:
        NixlConfig.from_mapping({"plugin_options": {"secret_key": "hunter2", "depth": 7}})
    assert "hunter2" not in str(e.value)


def test_keys_of_a_configuration_are_those_of_its_fields_and_groups() -> None:
    names = ["address", "size", "mode", "extras", "api_key", "wait_s"]
    assert [one.name for one in settings_of(Outer)] == names


def test_a_table_shows_values_and_defaults() -> None:
    shown = {one.name: (shown_values(one), shown_default(one)) for one in settings_of(Outer)}
    assert shown["address"] == ("address", "required")
    assert shown["size"] == ("size", '`"8MiB"`')
    assert shown["mode"] == ("`on`, `off`", "`on`")
    assert shown["extras"] == ("object", "none")
    assert shown["wait_s"] == ("seconds, at least 0.5", "`2`")


def test_keys_of_guard_and_wrappers_are_read_once_for_a_store_of_several_components(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        "file_storage_path": str(tmp_path), "min_free_space": 0, "deadline_s": 30.0, "join_retry_s": 2.0,
        "retries": 2, "quantise": "none", "quota": "1MiB", "quota_path": str(tmp_path / "quotas"),
    }  # fmt: skip
    counts: Counter[str] = Counter()
    check = Setting.check

    def counted(one: Setting, where: str, value: Any) -> Any:
        counts[one.name] += 1
        return check(one, where, value)

    monkeypatch.setattr(Setting, "check", counted)
    settings = StoreSettings.read(keys)
    trust_of("file", settings, Trust(None))
    stores = open_stores("file", settings, BOTH, required=False)
    limits = [part.limits for part in stores.parts]
    stores.close()
    of_the_backend = ("file_storage_path", "min_free_space")
    assert counts == {key: 2 if key in of_the_backend else 1 for key in keys}  # a backend for each component
    assert [dataclasses.astuple(one)[0] for one in limits] == [30.0, 30.0]
