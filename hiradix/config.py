"""Cache configuration: values, SGLang 0.5.23's defaults, the rules that reconcile them. Standard library.

Every error is a `ConfigError` whose message starts with the flag or extra-config key that has the bad value.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import os
import re
import select
import stat
import sys
import time
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hiradix.errors import ConfigError

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
MAX_PORT = 65535
MAX_SECONDS = 1e9  # thirty years: clocks and libraries can add it to today
MAX_FILE_BYTES = 1 << 20  # of settings, or of a key
FILE_TIMEOUT_S = 10.0  # until such a file, which may be a pipe, has been written
MAX_HOST_SIZE = 1e9  # in GB, and as a ratio: beyond any machine, and what follows from it is still a number

EXTRA_CONFIG_FLAG = "--hicache-storage-backend-extra-config"
IDENTITY_KEY = "hicache_storage_identity"
REQUIRED_KEY = "hicache_storage_required"
REFUSED = {
    ("--hicache-io-backend", "kernel_ascend"): "Ascend NPUs are not supported; use kernel, direct or auto",
    ("--hicache-mem-layout", "page_first_kv_split"): "this layout is for Ascend NPUs; use page_first",
    ("--hicache-mem-layout", "page_head"): "head-split pages are not supported; use page_first",
    ("--hicache-host-memory-mode", "buffer_only"): "a staging-only host pool is not supported; use cache",
}
_EXCLUSIVE = (
    "The arguments enable-hierarchical-cache and disable-radix-cache are mutually exclusive and cannot be "
    "used at the same time. Please use only one of them."
)


def require_label(flag: str, value: object) -> str | None:
    """`value` when it is text that is not blank, or None."""
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise ConfigError(f"{flag}: expected a label, got {value!r:.80}")
    return value


def require_choice(flag: str, value: object, choices: Collection[str]) -> str:
    """`value` when it is one of `choices`; upstream names we lack are refused with the reason."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{flag}: unknown value {value!r}, expected one of {', '.join(choices)}")
    reason = REFUSED.get((flag, value))
    if reason is not None:
        raise ConfigError(f"{flag} {value}: {reason}")
    return value


def require_int(flag: str, value: object, minimum: int = 0, maximum: int | None = None) -> int:
    """`value` when it is an int (a bool is not), at least `minimum` and, where given, at most `maximum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{flag} must be int, got {type(value).__name__}")
    if value < minimum:
        raise ConfigError(f"{flag} must be >= {minimum}, got {value}")
    if maximum is not None and value > maximum:
        raise ConfigError(f"{flag} must be <= {maximum}, got {value}")
    return value


def require_number(
    flag: str, value: object, minimum: float = 0.0, maximum: float = sys.float_info.max
) -> float:
    """`value` as a float when it is a finite int or float (a bool is not) in [minimum, maximum]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{flag} must be number, got {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value) or value < minimum:
        raise ConfigError(f"{flag} must be a finite number >= {minimum:g}, got {value}")
    if value > maximum:
        raise ConfigError(f"{flag} must be at most {maximum:g}, got {value}")
    return float(value)


def require_bool(flag: str, value: object) -> bool:
    """`value` when it is a bool; 0 and 1 are not."""
    if not isinstance(value, bool):
        raise ConfigError(f"{flag} must be bool, got {type(value).__name__}")
    return value


def _optional_bool(flag: str, value: object) -> bool | None:
    return None if value is None else require_bool(flag, value)


def _frozen(mapping: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    return MappingProxyType(dict(mapping or {}))


@dataclass(frozen=True)
class ExtraConfig:
    """Parsed `--hicache-storage-backend-extra-config`: the cache's own keys, and `backend`: all the rest.

    Attributes:
        prefetch_threshold: tokens a storage hit must have to be fetched (the cache uses at least one page).
        prefetch_timeout_base: seconds every prefetch may take.
        prefetch_timeout_per_ki_token: seconds more for each 1024 tokens.
        hicache_storage_pass_prefix_keys: give backends the page hashes before a batch.
        hicache_storage_required: whether a store that does not answer is an error, rather than joined later.
            None: not at a start, but for an attach while serving.
        storage_identity: key `hicache_storage_identity`; goes before `--hicache-storage-identity`.
        backend: keys for the storage backend, unchecked here.
    """

    prefetch_threshold: int = 256
    prefetch_timeout_base: float = 1.0
    prefetch_timeout_per_ki_token: float = 0.25
    hicache_storage_pass_prefix_keys: bool = False
    hicache_storage_required: bool | None = None
    storage_identity: str | None = None
    backend: Mapping[str, Any] = field(default_factory=_frozen)

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
        default = ExtraConfig()
        return ExtraConfig(
            prefetch_threshold=require_int(
                name("prefetch_threshold"), rest.pop("prefetch_threshold", default.prefetch_threshold)
            ),
            prefetch_timeout_base=require_number(
                name("prefetch_timeout_base"),
                rest.pop("prefetch_timeout_base", default.prefetch_timeout_base),
                maximum=MAX_SECONDS,
            ),
            prefetch_timeout_per_ki_token=require_number(
                name("prefetch_timeout_per_ki_token"),
                rest.pop("prefetch_timeout_per_ki_token", default.prefetch_timeout_per_ki_token),
                maximum=MAX_SECONDS,
            ),
            hicache_storage_pass_prefix_keys=require_bool(
                name("hicache_storage_pass_prefix_keys"), rest.pop("hicache_storage_pass_prefix_keys", False)
            ),
            hicache_storage_required=_optional_bool(name(REQUIRED_KEY), rest.pop(REQUIRED_KEY, None)),
            storage_identity=require_label(name(IDENTITY_KEY), rest.pop(IDENTITY_KEY, None)),
            backend=_frozen(rest),
        )

    def when_serving(self) -> ExtraConfig:
        """The same for an attach by somebody who waits for the answer: required unless it says otherwise."""
        is_required = self.hicache_storage_required
        return dataclasses.replace(self, hicache_storage_required=is_required is not False)

    @property
    def opening(self) -> Mapping[str, Any]:
        """What the opener of the backend is told, as `from_mapping` takes it: the backend's keys, whether the
        backend is required, and whose pages they are."""
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


def read_small_file(path: str | Path) -> tuple[bytes, int]:
    """What a file of settings or of a key holds, and its mode.

    Of a pipe, such as a shell's `<(command)`, what comes within FILE_TIMEOUT_S. Raises OSError, also for more
    than MAX_FILE_BYTES.
    """
    descriptor = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    until, num_left = time.monotonic() + FILE_TIMEOUT_S, MAX_FILE_BYTES + 1
    parts: list[bytes] = []
    try:
        about = os.fstat(descriptor)
        waits = select.poll()
        waits.register(descriptor, select.POLLIN)
        while num_left > 0:
            left_s = until - time.monotonic()
            if not stat.S_ISREG(about.st_mode) and (left_s <= 0 or not waits.poll(left_s * 1000)):
                raise OSError(errno.ETIMEDOUT, f"was not written and closed within {FILE_TIMEOUT_S:g} s")
            try:
                part = os.read(descriptor, num_left)
            except BlockingIOError:
                continue
            if not part:
                return b"".join(parts), stat.S_IMODE(about.st_mode)
            parts.append(part)
            num_left -= len(part)
    finally:
        os.close(descriptor)
    raise OSError(errno.EFBIG, f"has more than {MAX_FILE_BYTES} bytes")


def _load_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            "YAML needs the package pyyaml (pip install pyyaml), or use .json or .toml"
        ) from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"not valid YAML: {error}") from error


def _load_file(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix not in (".json", ".toml", ".yaml", ".yml"):
        raise ConfigError(f"Unsupported config file {path} (config format: {suffix})")
    try:
        text = read_small_file(path)[0].decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if suffix == ".json":
        return json.loads(text)
    return tomllib.loads(text) if suffix == ".toml" else _load_yaml(text)


def load_mapping(flag: str, text: str | None) -> dict[str, Any]:
    """The object in `text` (JSON), or in the file of `@path` (.json, .toml, .yaml, .yml); {} for nothing."""
    text = (text or "").strip()
    if not text:
        return {}
    try:
        value = _load_file(Path(text[1:]).expanduser()) if text.startswith("@") else json.loads(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error
    except (ValueError, RecursionError) as error:  # of JSON and TOML their own, and numbers of endless digits
        source = text if text.startswith("@") else f"the text ({len(text)} characters)"
        raise ConfigError(f"{flag}: {source} is not valid: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{flag}: expected an object with string keys, got {type(value).__name__}")
    return value


def parse_extra_config(text: str | None) -> ExtraConfig:
    """`text` is JSON, `@path` to a .json/.toml/.yaml file, or nothing; raises ConfigError naming the key."""
    return ExtraConfig.from_mapping(load_mapping(EXTRA_CONFIG_FLAG, text))


_SECRET = re.compile(  # a number per 1024 tokens is no token
    r"passw|secret|credential|private|api_?key|access_?key|authorization|signature|(^|_)auth$"
    r"|(^|_)(?<!_ki_)token$|(^|_)key(_base64)?$|(^|_)(ak|sk|pwd|sig)$",
    re.IGNORECASE,
)
_QUERY = re.compile(r"(?<=[?&])(?P<name>[^=&#\s]+)=[^&#\s]+")
_USER_INFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^/@\s]*@", re.IGNORECASE)


def redact(value: Any, key: str = "") -> Any:
    """`value` for display: '***' where a key's name says secret, also in URLs, and for their user info."""
    own_keys = {entry.name for entry in dataclasses.fields(ExtraConfig)}
    if _SECRET.search(key) and key not in own_keys and value is not None:
        return "***"
    if isinstance(value, Mapping):
        return {str(name): redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if not isinstance(value, str):
        return value
    return _QUERY.sub(_hide, _USER_INFO.sub(r"\g<scheme>***@", value))


def _hide(found: re.Match[str]) -> str:
    name = found["name"]
    return f"{name}=***" if _SECRET.search(name) else found[0]


@dataclass(frozen=True)
class HiCacheConfig:
    """What a prefix cache needs to know, with upstream's names; validated when made, see `normalised()`.

    `page_size` is in tokens, `hicache_size` in GB of 1e9 bytes (0: use the ratio), `hicache_ratio` is host
    pool tokens per device pool token (None: the default, shrunk to `hicache_host_memory_fraction` of free
    memory).
    """

    page_size: int = DEFAULT_PAGE_SIZE
    enable_hierarchical_cache: bool = False
    disable_radix_cache: bool = False
    hicache_ratio: float | None = None
    hicache_size: float = 0
    hicache_host_memory_fraction: float = 0.8
    hicache_write_policy: str = "write_through"
    hicache_io_backend: str = "kernel"
    hicache_mem_layout: str = "page_first"
    hicache_host_memory_mode: str = "cache"
    hicache_storage_backend: str | None = None
    hicache_storage_prefetch_policy: str = "timeout"
    hicache_storage_identity: str | None = None
    hicache_no_regret: bool = True
    hicache_storage_backend_extra_config: ExtraConfig = field(default_factory=ExtraConfig)
    radix_eviction_policy: str = "ghd"
    radix_eviction_policy_config: Mapping[str, Any] = field(default_factory=_frozen)
    served_model_name: str = ""

    def __post_init__(self) -> None:
        if self.enable_hierarchical_cache and self.disable_radix_cache:
            raise ConfigError(_EXCLUSIVE)
        require_int("--page-size", self.page_size, 1)
        if self.hicache_ratio is not None:
            require_number("--hicache-ratio", self.hicache_ratio, maximum=MAX_HOST_SIZE)
            if self.hicache_ratio == 0:
                raise ConfigError("--hicache-ratio must be > 0, got 0")
        require_number("--hicache-size", self.hicache_size, maximum=MAX_HOST_SIZE)
        fraction = require_number("--hicache-host-memory-fraction", self.hicache_host_memory_fraction)
        if not 0 < fraction <= 1:
            raise ConfigError("--hicache-host-memory-fraction must be in (0, 1].")
        require_choice("--hicache-write-policy", self.hicache_write_policy, WRITE_POLICIES)
        require_choice("--hicache-io-backend", self.hicache_io_backend, IO_BACKENDS)
        require_choice("--hicache-mem-layout", self.hicache_mem_layout, MEM_LAYOUTS)
        require_choice("--hicache-host-memory-mode", self.hicache_host_memory_mode, HOST_MEMORY_MODES)
        require_choice(
            "--hicache-storage-prefetch-policy", self.hicache_storage_prefetch_policy, PREFETCH_POLICIES
        )
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
    def host_ratio(self) -> float:
        """Host pool tokens per device pool token, with the default put in."""
        return DEFAULT_HICACHE_RATIO if self.hicache_ratio is None else float(self.hicache_ratio)

    @property
    def host_size_bytes(self) -> int:
        """The host pool's explicit size in bytes, 0 where the ratio decides."""
        return int(self.hicache_size * GB)

    def normalised(self) -> HiCacheConfig:
        """The configuration with upstream's rewrites applied, each one logged as a warning. Idempotent."""
        config, warnings = normalise(self)
        for warning in warnings:
            logger.warning(warning)
        return config


def without_host_tier(given: Iterable[str]) -> tuple[str, ...]:
    """What to say of flags of the host tier that are given while there is none; nothing if there are none."""
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
