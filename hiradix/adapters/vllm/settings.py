"""`kv_connector_extra_config` as our configuration: the flags' names with underscores, their defaults."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hiradix.config import (
    MAX_PORT,
    REQUIRED_KEY,
    ExtraConfig,
    HiCacheConfig,
    require_bool,
    require_choice,
    require_int,
    require_number,
)
from hiradix.errors import ConfigError
from hiradix.storage.attach.rules import AttachRules, default_of, parse_prepared, parse_rule

ADMIN_KEY_ENV = "HIRADIX_ADMIN_API_KEY"
LOAD_MODES = ("auto", "sync", "async")
AFTER_RESET = ("apart", "same")
OWN_KEYS = (
    REQUIRED_KEY, "load_mode", "drain_timeout_s", "admin_port", "admin_api_key", "storage_after_reset",
    "attachable", "attach_allow",
)  # fmt: skip
CONFIG_KEYS = (
    "hicache_ratio", "hicache_size", "hicache_host_memory_fraction", "hicache_write_policy",
    "hicache_io_backend", "hicache_mem_layout", "hicache_storage_backend",
    "hicache_storage_prefetch_policy", "hicache_storage_identity", "hicache_storage_backend_extra_config",
    "radix_eviction_policy", "radix_eviction_policy_config", "served_model_name",
)  # fmt: skip
TEXTS = {"served_model_name": None, "admin_api_key": None, "radix_eviction_policy": "lru"}  # and what is none
WRITE_BACK = (
    "saves what vLLM's own prefix cache evicts, and that is off; use --enable-prefix-caching or write_through"
)


@dataclass(frozen=True)
class Settings:
    """cache: as the flags of `hiradix serve`. load_mode: see docs/vllm.md.

    drain_timeout_s: how long a shutdown waits for what is on its way to storage. admin_port: of the admin
    endpoint (see `admin`) of the first data parallel rank; None for none, 0 for a free port.
    storage_after_reset: whether pages are stored under other names when vLLM has reset the connector.
    attach_rules: what the endpoint may attach.
    """

    cache: HiCacheConfig
    load_mode: str = "auto"
    drain_timeout_s: float = 10.0
    admin_port: int | None = None
    admin_api_key: str | None = field(default=None, repr=False)
    storage_after_reset: str = "apart"
    attach_rules: AttachRules = field(default_factory=AttachRules)

    @property
    def may_store(self) -> bool:
        """Whether there is storage, or an endpoint that may attach one."""
        return self.cache.hicache_storage_backend is not None or self.admin_port is not None

    def admin_port_of(self, dp_rank: int) -> int | None:
        """The port of a data parallel rank's endpoint: its own, as ranks of a host cannot share one."""
        if not self.admin_port:
            return self.admin_port
        port = self.admin_port + dp_rank
        if port > MAX_PORT:
            raise ConfigError(f"admin_port {self.admin_port}: that of data parallel rank {dp_rank} is {port}")
        return port


def parse_settings(values: Mapping[str, Any], page_size: int) -> Settings:
    """Settings from vLLM's mapping. Raises ConfigError naming the key."""
    unknown = sorted(set(values) - {*OWN_KEYS, *CONFIG_KEYS})
    if unknown:
        known = ", ".join((*CONFIG_KEYS, *OWN_KEYS))
        raise ConfigError(f"kv_connector_extra_config: unknown key {unknown[0]!r}; known: {known}")
    _check_texts(values)
    given = {key: values[key] for key in CONFIG_KEYS if key in values}
    if "hicache_storage_backend_extra_config" in given:
        given["hicache_storage_backend_extra_config"] = _extra(given["hicache_storage_backend_extra_config"])
    if REQUIRED_KEY in values:
        extra = given.get("hicache_storage_backend_extra_config", ExtraConfig())
        is_required = require_bool(REQUIRED_KEY, values[REQUIRED_KEY])
        if extra.hicache_storage_required not in (None, is_required):
            raise ConfigError(f"{REQUIRED_KEY} is in hicache_storage_backend_extra_config, too: give it once")
        extra = dataclasses.replace(extra, hicache_storage_required=is_required)
        given["hicache_storage_backend_extra_config"] = extra
    cache = HiCacheConfig(page_size=page_size, enable_hierarchical_cache=True, **given).normalised()
    port = values.get("admin_port")
    if port is not None:
        require_int("admin_port", port, 0, MAX_PORT)
    return Settings(
        cache,
        require_choice("load_mode", values.get("load_mode", "auto"), LOAD_MODES),
        require_number("drain_timeout_s", values.get("drain_timeout_s", 10.0)),
        port,
        _admin_key(values),
        require_choice("storage_after_reset", values.get("storage_after_reset", "apart"), AFTER_RESET),
        _attach_rules(values, cache),
    )


def _admin_key(values: Mapping[str, Any]) -> str | None:
    """That of the settings, else of the environment, where it is none of the command line."""
    key: str | None = values.get("admin_api_key", os.environ.get(ADMIN_KEY_ENV))
    if key is not None and not key.strip():
        raise ConfigError(f"{ADMIN_KEY_ENV} is empty: unset it, or give a key")
    return key


def _attach_rules(values: Mapping[str, Any], cache: HiCacheConfig) -> AttachRules:
    prepared, rules = values.get("attachable", {}), values.get("attach_allow", [])
    if not isinstance(prepared, Mapping) or not all(isinstance(name, str) for name in prepared):
        raise ConfigError("attachable must be an object of configurations by name")
    if not isinstance(rules, list | tuple) or not all(isinstance(rule, str) for rule in rules):
        raise ConfigError("attach_allow must be a list of texts such as backend=disk,path=/data/kv")
    start = default_of(cache.hicache_storage_backend, cache.hicache_storage_backend_extra_config)
    given = {name: parse_prepared("attachable", name, value) for name, value in prepared.items()}
    return AttachRules({**start, **given}, tuple(parse_rule(rule, "attach_allow") for rule in rules))


def _check_texts(values: Mapping[str, Any]) -> None:
    for key, unset in TEXTS.items():
        value = values.get(key, unset)
        if value != unset and not isinstance(value, str):
            raise ConfigError(f"{key} must be text, got {type(value).__name__}")
    if values.get("admin_api_key") == "":
        raise ConfigError("admin_api_key is empty: leave it out, or give one")
    if not isinstance(values.get("radix_eviction_policy_config", {}), Mapping):
        raise ConfigError("radix_eviction_policy_config must be an object")


def check_write_policy(settings: Settings, has_prefix_cache: bool) -> None:
    """Refuse write_back without vLLM's prefix cache: what it computed would be found by nobody until then."""
    if settings.cache.hicache_write_policy == "write_back" and not has_prefix_cache:
        raise ConfigError(f"hicache_write_policy write_back: {WRITE_BACK}")


def _extra(values: Any) -> ExtraConfig:
    if not isinstance(values, Mapping):
        raise ConfigError("hicache_storage_backend_extra_config must be an object")
    return ExtraConfig.from_mapping(values)


def with_served_name(settings: Settings, name: str) -> Settings:
    """The same with the model's name put in where none was given."""
    if settings.cache.served_model_name:
        return settings
    return dataclasses.replace(settings, cache=dataclasses.replace(settings.cache, served_model_name=name))
