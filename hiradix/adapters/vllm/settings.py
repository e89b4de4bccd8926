"""`kv_connector_extra_config` as our configuration: the flags' names with underscores, their defaults."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hiradix.config import (
    REQUIRED_KEY,
    ExtraConfig,
    HiCacheConfig,
)
from hiradix.errors import ConfigError
from hiradix.intents.limits import IntentLimits
from hiradix.policy.admission import admission_policies
from hiradix.settings import (
    MAX_PORT,
    Setting,
    Type,
    fields_of,
    group,
    nearest,
    read,
    require_bool,
    require_stores,
    setting,
    setting_of,
    settings_of,
)
from hiradix.sources import CONFIG, Given, SettingSource, resolve
from hiradix.storage.attach.rules import AttachRules, default_of, rules_of

logger = logging.getLogger(__name__)
ADMIN_KEY_ENV = "HIRADIX_ADMIN_API_KEY"
NOT_HERE = (
    "page_size", "enable_hierarchical_cache", "disable_radix_cache",  # vLLM's own
    "hicache_host_memory_mode",
)  # fmt: skip
"""Settings of the cache that are no keys of vLLM's mapping."""
NO_REGRET = setting_of(HiCacheConfig, "hicache_no_regret")
CONFIG_KEYS = tuple(one.name for one in settings_of(HiCacheConfig) if one.name not in NOT_HERE)
WRITE_BACK = (
    "saves what vLLM's own prefix cache evicts, and that is off; use --enable-prefix-caching or write_through"
)


def own_settings() -> tuple[Setting, ...]:
    """The settings that only vLLM's mapping has, beside the cache's."""
    return tuple(
        one for _, one in fields_of(Settings) if one.name not in ("admin_api_key", "schedule_policy")
    )


@dataclass(frozen=True)
class Settings:
    """cache: as the flags of `hiradix serve`. attach_rules: what the admin endpoint (`admin`) may attach.
    intents: caps on wishes."""

    ALSO: ClassVar = (
        setting_of(ExtraConfig, REQUIRED_KEY),
        Setting("attachable", Type.STORES, {}, "configurations that the admin endpoint attaches by name"),
        Setting("attach_allow", Type.LIST, (), "rules of what else it may attach, as of `--attach-allow`"),
    )

    cache: HiCacheConfig
    load_mode: str = setting(
        "load_mode",
        Type.TEXT,
        "auto",
        "`sync`: a request's load runs with its own step, layer by layer beside the forward. `async`: beside "
        "other requests' steps. `auto`: `sync` where vLLM can take back a step whose load failed",
        choices=("auto", "sync", "async"),
    )
    drain_timeout_s: float = setting(
        "drain_timeout_s",
        Type.NUMBER,
        10.0,
        "longest a shutdown waits, in seconds, for what is on its way to storage",
    )
    admin_port: int | None = setting(
        "admin_port",
        Type.INTEGER,
        None,
        "of the admin endpoint of the first data parallel rank; none for none, 0 for a free port",
        maximum=MAX_PORT,
    )
    admin_api_key: str | None = setting(
        "admin_api_key",
        Type.SECRET,
        None,
        "its key",
    )
    storage_after_reset: str = setting(
        "storage_after_reset",
        Type.TEXT,
        "apart",
        "`apart`: when vLLM has reset the connector, pages are stored under other names, as weights may have "
        "changed. `same`: under those as before",
        choices=("apart", "same"),
    )
    schedule_policy: str = setting(
        "schedule_policy",
        Type.TEXT,
        "cached",
        "of HiRadixScheduler: whom of those that wait it offers vLLM first; for a scheduler without this "
        "connector the variable",
        choices=tuple(admission_policies()),
    )
    attach_rules: AttachRules = field(default_factory=AttachRules)
    intents: IntentLimits = group(IntentLimits)

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


def table() -> tuple[Setting, ...]:
    """All that vLLM's mapping may have, once each."""
    cache = [one for one in settings_of(HiCacheConfig) if one.name in CONFIG_KEYS]
    return (*cache, *settings_of(Settings))


def with_other_sources(values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """vLLM's mapping, with what only variables and the file say: `config` in the mapping, or HIRADIX_CONFIG.

    Raises ConfigError naming the variable or the line.
    """
    said = {name: Given(value, SettingSource.FLAG, name) for name, value in values.items()}
    found = resolve(table(), said, environment, dict.fromkeys(NOT_HERE, "vLLM's own flag"), is_guest=True)
    found.check()
    for note in found.notes:
        logger.info(note)
    return {name: given.value for name, given in found.given.items() if name != CONFIG.name}


def parse_settings(
    values: Mapping[str, Any], page_size: int, environment: Mapping[str, str] | None = None
) -> Settings:
    """Settings from vLLM's mapping, the environment (the process's) and a file. Raises ConfigError naming the
    key."""
    known_keys = (*(one.name for one in table()), CONFIG.name)
    unknown = sorted(set(values) - set(known_keys))
    if unknown:
        hint = nearest(unknown[0], known_keys) or f"; known: {', '.join(known_keys)}"
        raise ConfigError(f"kv_connector_extra_config: unknown key {unknown[0]!r}{hint}")
    _check_texts(values)
    values = with_other_sources(values, os.environ if environment is None else environment)
    given = {key: values[key] for key in CONFIG_KEYS if key in values}
    if "hicache_storage_backend_extra_config" in given:
        given["hicache_storage_backend_extra_config"] = _extra(given["hicache_storage_backend_extra_config"])
    if NO_REGRET.name in given:
        given[NO_REGRET.name] = NO_REGRET.check(NO_REGRET.name, given[NO_REGRET.name]) == "on"
    if REQUIRED_KEY in values:
        extra = given.get("hicache_storage_backend_extra_config", ExtraConfig())
        is_required = require_bool(REQUIRED_KEY, values[REQUIRED_KEY])
        if extra.hicache_storage_required not in (None, is_required):
            raise ConfigError(f"{REQUIRED_KEY} is in hicache_storage_backend_extra_config, too: give it once")
        extra = dataclasses.replace(extra, hicache_storage_required=is_required)
        given["hicache_storage_backend_extra_config"] = extra
    cache = HiCacheConfig(page_size=page_size, enable_hierarchical_cache=True, **given).normalised()
    own = {
        field: one.check(one.name, values[one.name])
        for field, one in fields_of(Settings)
        if one.name in values
    }
    own["attach_rules"] = _attach_rules(values, cache)
    own["intents"] = read(IntentLimits, values, str)
    return Settings(cache, **own)


def schedule_policy(transfer: Any) -> str:
    """The admission policy that a scheduler beside vLLM's KVTransferConfig, or None, goes by."""
    one = setting_of(Settings, "schedule_policy")
    own = getattr(transfer, "kv_connector", None) == "HiRadixConnector"
    values = with_other_sources(transfer.kv_connector_extra_config if own else {}, os.environ)
    return str(one.check(one.name, values.get(one.name, one.default)))


def _attach_rules(values: Mapping[str, Any], cache: HiCacheConfig) -> AttachRules:
    prepared, rules = values.get("attachable", {}), values.get("attach_allow", [])
    require_stores("attachable", prepared)
    if not isinstance(rules, list | tuple) or not all(isinstance(rule, str) for rule in rules):
        raise ConfigError("attach_allow must be a list of texts such as backend=disk,path=/data/kv")
    start = default_of(cache.hicache_storage_backend, cache.hicache_storage_backend_extra_config)
    return rules_of(prepared, rules, lambda name: name, start)


def _check_texts(values: Mapping[str, Any]) -> None:
    for key, unset in {"served_model_name": None, "radix_eviction_policy": ""}.items():
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
