"""Cache configuration: values, SGLang 0.5.23's defaults, the rules that reconcile them. Standard library.

Every error is a `ConfigError` whose message starts with the flag or extra-config key that has the bad value.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hiradix.config_files import load_mapping
from hiradix.errors import ConfigError
from hiradix.settings import NUMBERS, OPEN, Type, fields_of, require_label, setting

logger = logging.getLogger(__name__)

WRITE_POLICIES = ("write_back", "write_through", "write_through_selective")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
IO_BACKENDS = ("auto", "direct", "kernel", "kernel_ascend")
MEM_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_first_kv_split", "page_head")
HOST_MEMORY_MODES = ("cache", "buffer_only")
DEFAULT_PAGE_SIZE = 64
DEFAULT_HICACHE_RATIO = 2.0
RANK_TIMEOUT_S = 90.0  # more than any wait of one rank: for a load (30 s), a reset (30 s), a detach (10 s)
GB = 1_000_000_000
MAX_HOST_SIZE = 1e9  # in GB, and as a ratio: beyond any machine, and what follows from it is still a number

EXTRA_CONFIG_FLAG = "--hicache-storage-backend-extra-config"
IDENTITY_KEY = "hicache_storage_identity"
REQUIRED_KEY = "hicache_storage_required"
_EXCLUSIVE = (
    "The arguments enable-hierarchical-cache and disable-radix-cache are mutually exclusive and cannot be "
    "used at the same time. Please use only one of them."
)


def _frozen(mapping: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    return MappingProxyType(dict(mapping or {}))


@dataclass(frozen=True)
class ExtraConfig:
    """Parsed `--hicache-storage-backend-extra-config`: the cache's own keys, and `backend`: all the rest,
    which the storage backend checks.

    hicache_storage_required: whether a store that does not answer is an error, rather than joined later.
    """

    prefetch_threshold: int = setting(
        "prefetch_threshold",
        Type.INTEGER,
        256,
        "tokens a storage hit must have to be fetched; at least one page",
        over_http=OPEN,
    )
    prefetch_timeout_base: float = setting(
        "prefetch_timeout_base",
        Type.SECONDS,
        1.0,
        "any prefetch may take this long under the policy `timeout`",
        over_http=OPEN,
    )
    prefetch_timeout_per_ki_token: float = setting(
        "prefetch_timeout_per_ki_token",
        Type.SECONDS,
        0.25,
        "a prefetch may take this much longer for each 1024 tokens",
        over_http=OPEN,
    )
    hicache_storage_pass_prefix_keys: bool = setting(
        "hicache_storage_pass_prefix_keys",
        Type.BOOL,
        False,
        "give the backend the keys of the pages before a batch",
        over_http=OPEN,
    )
    hicache_storage_required: bool | None = setting(
        REQUIRED_KEY,
        Type.BOOL,
        None,
        "a store that does not answer is an error; otherwise it is "
        "[joined later](storage.md#a-store-that-is-not-there-at-start)",
        default_text="false at a start, true for an attach while serving",
        over_http=OPEN,
    )
    storage_identity: str | None = setting(  # not over HTTP: it takes the comparison of weights away
        IDENTITY_KEY,
        Type.LABEL,
        None,
        "as `--hicache-storage-identity`, which it goes before; in SGLang and vLLM too",
    )
    hicache_no_regret: str | None = setting(
        "hicache_no_regret",
        Type.TEXT,
        None,
        "as `--hicache-no-regret`, which it goes before: inside SGLang, which has no such flag",
        choices=("on", "off"),
    )
    backend: Mapping[str, Any] = field(default_factory=_frozen, repr=False)

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> ExtraConfig:
        """Splits `values` into our keys and the backend's; raises ConfigError naming the key."""
        rest = with_secrets_of_environment(values, os.environ)

        def name(key: str) -> str:
            return f"{EXTRA_CONFIG_FLAG}: {key}"

        if "tp_lcm_size" in rest:
            raise ConfigError(name("tp_lcm_size needs the page_head layout, which is not supported"))
        if rest.get("allocator") not in (None, "default"):
            raise ConfigError(name(f"allocator {rest['allocator']!r} is not supported, leave it out"))
        own = {
            field: one.check(name(one.name), rest.pop(one.name))
            for field, one in fields_of(ExtraConfig)
            if one.name in rest
        }
        return ExtraConfig(**own, backend=_frozen(rest))

    def when_serving(self) -> ExtraConfig:
        """The same for an attach by somebody who waits for the answer: required unless it says otherwise."""
        is_required = self.hicache_storage_required
        return dataclasses.replace(self, hicache_storage_required=is_required is not False)

    @property
    def opening(self) -> Mapping[str, Any]:
        """The keys for the opener of the backend, as `from_mapping` takes them: the backend's own, whether
        the backend is required, and the identity of the pages."""
        own = {REQUIRED_KEY: self.hicache_storage_required, IDENTITY_KEY: self.storage_identity}
        return _frozen({**self.backend, **{key: value for key, value in own.items() if value is not None}})

    def with_backend(self, **values: Any) -> ExtraConfig:
        """The same with `values` added to the backend's keys where those do not set them already."""
        return dataclasses.replace(self, backend=_frozen({**values, **self.backend}))


SECRET_KEYS = ("password", "sentinel_password", "access_key_id", "secret_access_key", "session_token")
_ENV_SUFFIX = "_env"


def with_secrets_of_environment(values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """`values` with those of SECRET_KEYS that are given as `<key>_env`, a variable's name, put in; in objects
    inside, too. Raises ConfigError naming the key, where the variable is not there or the key itself is
    given."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        secret = key.removesuffix(_ENV_SUFFIX)
        if secret == key or secret not in SECRET_KEYS:
            inside = isinstance(value, Mapping) and key in ("upper", "lower")
            found[key] = with_secrets_of_environment(value, environment) if inside else value
            continue
        if values.get(secret):
            raise ConfigError(f"{EXTRA_CONFIG_FLAG}: {secret} and {key} exclude each other")
        if not isinstance(value, str) or not environment.get(value):
            raise ConfigError(
                f"{EXTRA_CONFIG_FLAG}: {key}: there is no variable {value!r:.80}, or it is empty"
            )
        found[secret] = environment[value]
    return found


def parse_extra_config(text: str | None) -> ExtraConfig:
    """`text` is JSON, `@path` to a .json/.toml/.yaml file, or nothing; raises ConfigError naming the key."""
    return ExtraConfig.from_mapping(load_mapping(EXTRA_CONFIG_FLAG, text))


@dataclass(frozen=True)
class HiCacheConfig:
    """The settings of a prefix cache, with upstream's names; validated when made, see `normalised()`."""

    page_size: int = setting(
        "page_size",
        Type.INTEGER,
        DEFAULT_PAGE_SIZE,
        "Tokens per page.",
        minimum=1,
        default_text=f"{DEFAULT_PAGE_SIZE} with the hierarchical cache, else 1",
    )
    enable_hierarchical_cache: bool = setting(
        "enable_hierarchical_cache",
        Type.BOOL,
        False,
        "Turn the host tier on (and with a storage backend, the storage tier).",
        aliases=("enable_hicache",),
    )
    disable_radix_cache: bool = setting(
        "disable_radix_cache",
        Type.BOOL,
        False,
        "No prefix reuse at all; excludes the hierarchical cache.",
    )
    hicache_ratio: float | None = setting(
        "hicache_ratio",
        Type.NUMBER,
        None,
        "Host pool tokens per device pool token.",
        maximum=MAX_HOST_SIZE,
        default_text=f"{DEFAULT_HICACHE_RATIO}, shrunk to what fits the host memory fraction",
    )
    hicache_size: float = setting(
        "hicache_size",
        Type.NUMBER,
        0,
        "Host pool size in GB of 1e9 bytes; above 0 it overrides the ratio.",
        maximum=MAX_HOST_SIZE,
        metavar="GB",
    )
    hicache_host_memory_fraction: float = setting(
        "hicache_host_memory_fraction",
        Type.NUMBER,
        0.8,
        "Share of free host memory the pool may take when neither ratio nor size is given, in (0, 1].",
    )
    hicache_write_policy: str = setting(
        "hicache_write_policy",
        Type.TEXT,
        "write_through",
        "When pages are copied to the host: on first insert, on second hit (selective), or when evicted "
        "(write_back).",
        choices=WRITE_POLICIES,
    )
    hicache_io_backend: str = setting(
        "hicache_io_backend",
        Type.TEXT,
        "kernel",
        "How pages are copied: one Triton kernel, direct copies, or the faster one by a measurement at "
        "start. On CPU all are torch copies. kernel_ascend is refused.",
        choices=IO_BACKENDS,
        refused={"kernel_ascend": "Ascend NPUs are not supported; use kernel, direct or auto"},
    )
    hicache_mem_layout: str = setting(
        "hicache_mem_layout",
        Type.TEXT,
        "page_first",
        "Layout of the host pool. page_first_kv_split and page_head are refused.",
        choices=MEM_LAYOUTS,
        refused={
            "page_first_kv_split": "this layout is for Ascend NPUs; use page_first",
            "page_head": "head-split pages are not supported; use page_first",
        },
    )
    hicache_host_memory_mode: str = setting(
        "hicache_host_memory_mode",
        Type.TEXT,
        "cache",
        "Use of host memory. buffer_only is refused.",
        choices=HOST_MEMORY_MODES,
        refused={"buffer_only": "a staging-only host pool is not supported; use cache"},
    )
    hicache_storage_backend: str | None = setting(
        "hicache_storage_backend",
        Type.TEXT,
        None,
        "Storage tier by registered name, such as disk; needs the hierarchical cache.",
        metavar="NAME",
    )
    hicache_storage_prefetch_policy: str = setting(
        "hicache_storage_prefetch_policy",
        Type.TEXT,
        "timeout",
        "How long a request waits for pages from storage.",
        choices=PREFETCH_POLICIES,
    )
    hicache_storage_identity: str | None = setting(
        "hicache_storage_identity",
        Type.LABEL,
        None,
        "Pages in storage go by this label; whether the same weights computed them is not looked at.",
        metavar="LABEL",
    )
    hicache_no_regret: bool = setting(
        "hicache_no_regret",
        Type.TEXT,
        "on",
        "Do not load or fetch what is predicted to take longer than computing it again.",
        choices=("on", "off"),
        to=lambda text: text == "on",
    )
    hicache_storage_backend_extra_config: ExtraConfig = setting(
        "hicache_storage_backend_extra_config",
        Type.OBJECT,
        dict,
        "JSON object, or @path to a .json, .toml or .yaml file, with prefetch settings and the backend's "
        "keys.",
        metavar="JSON|@FILE",
        to=ExtraConfig.from_mapping,
    )
    radix_eviction_policy: str = setting(
        "radix_eviction_policy",
        Type.TEXT,
        "ghd",
        "Order in which pages are evicted; two with a comma between: device, host.",
        metavar="NAME",
    )
    radix_eviction_policy_config: Mapping[str, Any] = setting(
        "radix_eviction_policy_config",
        Type.OBJECT,
        dict,
        "JSON object of the eviction policy's parameters.",
        metavar="JSON",
        to=_frozen,
    )
    explain_names: int = setting(
        "explain_names",
        Type.INTEGER,
        1 << 18,
        "Pages that have left the cache and are remembered, 15 bytes each, to explain misses; 0: nothing is "
        "explained.",
        maximum=1 << 30,
    )
    served_model_name: str = setting(
        "served_model_name",
        Type.TEXT,
        "",
        "Name that requests use, and part of every storage key's fingerprint.",
        default_text="the model path",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        if self.enable_hierarchical_cache and self.disable_radix_cache:
            raise ConfigError(_EXCLUSIVE)
        for name, one in fields_of(HiCacheConfig):
            if one.type in NUMBERS or (one.choices and name != "hicache_no_regret"):
                one.check(one.flag, getattr(self, name))
        if self.hicache_ratio == 0:
            raise ConfigError("--hicache-ratio must be > 0, got 0")
        if not 0 < self.hicache_host_memory_fraction <= 1:
            raise ConfigError("--hicache-host-memory-fraction must be in (0, 1].")
        self._check_storage()
        if not isinstance(self.radix_eviction_policy_config, Mapping):
            raise ConfigError(
                "--radix-eviction-policy-config: expected a mapping, "
                f"got {type(self.radix_eviction_policy_config).__name__}"
            )

    def _check_storage(self) -> None:
        backend = self.hicache_storage_backend
        if backend is not None and (not isinstance(backend, str) or not backend.strip()):
            raise ConfigError(f"--hicache-storage-backend: expected a backend's name, got {backend!r}")
        require_label("--hicache-storage-identity", self.hicache_storage_identity)
        if not isinstance(self.hicache_storage_backend_extra_config, ExtraConfig):
            given = type(self.hicache_storage_backend_extra_config).__name__
            raise ConfigError(
                f"{EXTRA_CONFIG_FLAG}: expected an ExtraConfig (ExtraConfig.from_mapping), got {given}"
            )
        if backend is not None and not self.enable_hierarchical_cache:
            raise ConfigError(f"--hicache-storage-backend {backend} needs --enable-hierarchical-cache")

    @property
    def is_no_regret(self) -> bool:
        """Whether transfers that are predicted to be slower than computing are left."""
        inside = self.hicache_storage_backend_extra_config.hicache_no_regret
        return self.hicache_no_regret if inside is None else inside == "on"

    def normalised(self) -> HiCacheConfig:
        """The configuration with upstream's rewrites applied, each one logged as a warning. Idempotent."""
        config, warnings = normalise(self)
        for warning in warnings:
            logger.warning(warning)
        return config


def without_host_tier(given: Iterable[str]) -> tuple[str, ...]:
    """Notes on flags of the host tier that are given although there is none; empty without such flags."""
    names = ", ".join(given)
    return (f"{names}: nothing without --enable-hierarchical-cache",) if names else ()


def of_device_alone(config: HiCacheConfig) -> HiCacheConfig:
    """`config` with what is the host tier's and below as it is by itself."""
    default = HiCacheConfig()
    names = (field.name for field in dataclasses.fields(config) if field.name.startswith("hicache_"))
    return dataclasses.replace(config, **{name: getattr(default, name) for name in names})


def normalise(config: HiCacheConfig) -> tuple[HiCacheConfig, tuple[str, ...]]:
    """`config` with layout and io backend made to agree as upstream does, and a sentence for each change.

    Without the host tier, one that names what is set for it and does nothing.
    """
    if not config.enable_hierarchical_cache:
        bare = of_device_alone(config)
        names = [field.name for field in dataclasses.fields(config)]
        idle = [name for name in names if getattr(config, name) != getattr(bare, name)]
        return config, without_host_tier(f"--{name.replace('_', '-')}" for name in idle)
    layout, io_backend = config.hicache_mem_layout, config.hicache_io_backend
    warnings: list[str] = []
    if layout == "page_first_direct" and io_backend == "kernel":
        io_backend = "direct"
        warnings.append(
            "Kernel io backend does not support page first direct layout, switching to direct io backend"
        )
    if layout == "page_first" and io_backend == "direct":
        layout = "page_first_direct"
        warnings.append(
            "Page first layout is not supported with direct IO backend, switching to page first direct layout"
        )
    if config.hicache_storage_backend == "mooncake" and layout == "layer_first":
        layout = "page_first_direct" if io_backend == "direct" else "page_first"
        warnings.append(f"Mooncake storage needs whole pages, switching from layer_first to {layout} layout")
    changed = dataclasses.replace(config, hicache_mem_layout=layout, hicache_io_backend=io_backend)
    return changed, tuple(warnings)
