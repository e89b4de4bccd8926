"""Settings of ours from LMCache's, with a line for each key that was there.

Where a key becomes a setting, a method of the same name in `_Migration` makes that of its value. No value that
is secret is repeated: a variable is named for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from hiradix.apps.lmcache.keys import EXTRA_KEYS, KEYS, Fate, LMCacheKey
from hiradix.errors import ConfigError
from hiradix.settings import nearest, require_bool, require_number, require_text

PREFIX = "LMCACHE_"
EXTRA = "hicache_storage_backend_extra_config"
BACKEND = "hicache_storage_backend"
PASSWORD_VARIABLE = "REDIS_PASSWORD"
GIB = 1 << 30
_GB = 1e9
_MIB = 1 << 20


_NO_STORE = {
    "lm": "LMCache's own server is not spoken to; `redis`, `s3`, or `file` on a shared folder",
    "infinistore": "InfiniStore is not spoken to; `mooncake` is what there is over RDMA",
    "eic": "EIC is reached by SGLang's own class: backend `eic`",
    "sagemaker-hyperpod": "SageMaker HyperPod is not spoken to; `s3` is",
    "external": "another interface: `docs/your-backend.md`, or `dynamic` for classes made for SGLang",
    "audit": "each page carries its checksum; give the inner URL",
    "blackhole": "no store",
}
_LOCAL = ("disk", "nixl")
_POLICIES = ("lru", "lfu", "fifo", "mru")


@dataclass(frozen=True)
class Told:
    """A key of LMCache's, what became of it, and why: a line for its reader."""

    name: str
    fate: Fate
    text: str

    @property
    def line(self) -> str:
        """The line for the head of the new file."""
        return f"{self.name}: {self.text}"


@dataclass
class Migration:
    """settings: ours, as a file has them. told: a line for each key that was there."""

    settings: dict[str, Any] = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)


def from_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """LMCache's settings of the environment, as its file would have them."""
    found: dict[str, Any] = {}
    for variable, text in environment.items():
        name = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and text:
            found[name] = _plain(text)
    return found


def _plain(text: str) -> Any:
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, int | float | dict | list) else text


def migrate(values: Mapping[str, Any]) -> Migration:
    """Settings of ours from LMCache's. Raises ConfigError that begins with the key that has a wrong value, or
    is none of LMCache's."""
    unknown = [name for name in values if name not in KEYS]
    if unknown:
        raise ConfigError(
            f"{unknown[0]:.80}: is no setting of LMCache's that is known{nearest(unknown[0], KEYS)}"
        )
    run = _Migration({name: value for name, value in values.items() if value is not None})
    return run.result()


class _Migration:
    """One run: `values` as they were, and what is made of them."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values
        self._extra = self._object("extra_config")
        self._done = Migration()
        self._stores: dict[str, dict[str, Any]] = {}  # by backend, its keys
        self._common: dict[str, Any] = {}  # keys of every backend, and of the cache

    def result(self) -> Migration:
        for name in self._values:
            make: Callable[[], str] | None = getattr(self, f"_{name}", None)
            self._tell(KEYS[name], name, make)
        for name in self._extra:
            if name not in EXTRA_KEYS:
                text = f"no key of extra_config that is known{nearest(name, EXTRA_KEYS)}"
                self._done.told.append(Told(f"extra_config.{name:.80}", Fate.ABSENT, text))
                continue
            make = getattr(self, f"_extra_{name}", None)
            if name in _AS_THEY_ARE:
                make = partial(self._of_store, *_AS_THEY_ARE[name], self._extra[name])
            self._tell(EXTRA_KEYS[name], f"extra_config.{name}", make)
        self._put_stores()
        return self._done

    def _tell(self, key: LMCacheKey, name: str, make: Callable[[], str] | None) -> None:
        made = "" if make is None or key.fate is not Fate.BECOMES else make()
        text = f"{made}; {key.text}" if made else key.text
        fate = key.fate if made or key.fate is not Fate.BECOMES else Fate.ABSENT
        self._done.told.append(Told(name, fate, text))

    def _put_stores(self) -> None:
        settings = self._done.settings
        if not self._stores:
            if self._common:
                settings[EXTRA] = self._common
            return
        settings["enable_hierarchical_cache"] = True
        if len(self._stores) == 1:
            ((settings[BACKEND], own),) = self._stores.items()
            settings[EXTRA] = {**own, **self._common}
            return
        if len(self._stores) > 2:
            raise ConfigError(f"{', '.join(self._stores)}: two stores become `tier`, leave one of them out")
        near_first = sorted(self._stores, key=_LOCAL.__contains__, reverse=True)
        upper, lower = ({"backend": name, **self._stores[name]} for name in near_first)
        settings[BACKEND] = "tier"
        outer = {name: self._common.pop(name) for name in ("prefetch_threshold",) if name in self._common}
        settings[EXTRA] = {"upper": upper, "lower": {**lower, **self._common}, **outer}

    # -- reading ------------------------------------------------------------------------

    def _object(self, name: str) -> Mapping[str, Any]:
        value = self._values.get(name, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be an object, got {type(value).__name__}")
        return value

    def _number(self, name: str) -> float:
        return require_number(name, self._values[name])

    def _text(self, name: str) -> str:
        return require_text(name, self._values[name], name)

    def _set(self, name: str, value: Any) -> str:
        self._done.settings[name] = value
        return f"{name} = {_shown(value)}"

    def _store(self, backend: str, **keys: Any) -> str:
        self._stores.setdefault(backend, {}).update(keys)
        return ", ".join(
            [f'{BACKEND} = "{backend}"', *(f"{key} = {_shown(value)}" for key, value in keys.items())]
        )

    # -- the outermost keys -------------------------------------------------------------

    def _chunk_size(self) -> str:
        return self._set("page_size", int(self._number("chunk_size")))

    def _local_cpu(self) -> str:
        if not require_bool("local_cpu", self._values["local_cpu"]):
            self._done.settings.setdefault("enable_hierarchical_cache", False)
            return "enable_hierarchical_cache = false, unless there is storage"
        return self._set("enable_hierarchical_cache", True)

    def _max_local_cpu_size(self) -> str:
        return self._set("hicache_size", round(self._number("max_local_cpu_size") * GIB / _GB, 3))

    def _local_disk(self) -> str:
        path = _path(self._text("local_disk"))
        size = self._values.get("max_local_disk_size")
        if size is None or require_number("max_local_disk_size", size) == 0:
            return "nothing: without max_local_disk_size there is no disk there"
        return self._store("disk", disk_storage_path=path)

    def _max_local_disk_size(self) -> str:
        num_bytes = int(self._number("max_local_disk_size") * GIB)
        if num_bytes == 0 or self._values.get("local_disk") is None:
            return "nothing: there is no disk"
        return self._store("disk", max_size=num_bytes)

    def _remote_url(self) -> str:
        text = self._text("remote_url")
        scheme, is_url, _ = text.partition("://")
        if not is_url:
            raise ConfigError("remote_url: expected a URL, such as redis://host:port")
        scheme = scheme.lower()
        if scheme in _NO_STORE:
            return f"nothing: {_NO_STORE[scheme]}"
        makers: dict[str, Callable[[str], str]] = {
            "redis": self._redis, "rediss": self._redis, "unix": self._redis, "valkey": self._redis,
            "redis-sentinel": self._sentinels, "s3": self._s3, "fs": self._folder,
            "mooncakestore": self._mooncake,
        }  # fmt: skip
        if scheme not in makers:
            raise ConfigError(
                f"remote_url: scheme {scheme[:40]!r} is not known; known: {', '.join((*makers, *_NO_STORE))}"
            )
        return makers[scheme](text)

    def _redis(self, text: str) -> str:
        parts = _split(text)
        if parts.scheme != "unix" and "@" in parts.path + parts.query + parts.fragment:
            raise ConfigError("remote_url: a / ? or # of a password is written %2F %3F %23")
        backend = "valkey" if parts.scheme == "valkey" else "redis"
        scheme = "redis" if parts.scheme == "valkey" else parts.scheme
        login, _, host = parts.netloc.rpartition("@")
        return self._with_login(login, backend, url=f"{scheme}://{host}{parts.path}")

    def _sentinels(self, text: str) -> str:
        login, _, sentinels = text.partition("://")[2].rstrip("/").rpartition("@")
        return self._with_login(login, "redis", url="redis://master", sentinels=sentinels)

    def _with_login(self, login: str, backend: str, **keys: Any) -> str:
        """login: "name:password", or "" without; the password is said by a variable."""
        name, _, password = login.partition(":")
        if name:
            keys["username"] = unquote(name)
        if password:
            keys["password_env"] = PASSWORD_VARIABLE
        said = self._store(backend, **keys)
        return f"{said} (its password: set {PASSWORD_VARIABLE})" if password else said

    def _s3(self, text: str) -> str:
        _without_login(text)
        return self._store("s3", url=text)

    def _folder(self, text: str) -> str:
        folders = _split(text).path.split(",")
        if len(folders) > 1:
            raise ConfigError(
                "remote_url: several folders become one: give the file system's, or one of them"
            )
        return self._store("file", file_storage_path=folders[0] or "/")

    def _mooncake(self, text: str) -> str:
        parts = _without_login(text)
        keys = {"master_server_address": parts.netloc}
        found = re.search(r"(?:^|&)device=([^&]+)", parts.query)
        if found is not None:
            keys["device_name"] = found[1]
        return self._store("mooncake", **keys)

    def _remote_serde(self) -> str:
        name = self._text("remote_serde").lower()
        if name not in ("naive", "cachegen", "kivi"):
            raise ConfigError(f"remote_serde: {name!r:.40} is not known; known: naive, cachegen, kivi")
        return ""

    def _cache_policy(self) -> str:
        name = self._text("cache_policy").lower()
        if name not in _POLICIES:
            raise ConfigError(f"cache_policy: {name!r:.40} is not known; known: {', '.join(_POLICIES)}")
        return self._set("radix_eviction_policy", name)

    def _blocking_timeout_secs(self) -> str:
        return self._put("deadline_s", self._number("blocking_timeout_secs"))

    def _min_retrieve_tokens(self) -> str:
        return self._put("prefetch_threshold", int(self._number("min_retrieve_tokens")))

    def _put(self, name: str, value: Any) -> str:
        self._common[name] = value
        return f"{name} = {_shown(value)}"

    def _gds_path(self) -> str:
        return self._store("nixl", plugin="GDS", file_storage_path=_path(self._text("gds_path")))

    def _weka_path(self) -> str:
        return self._store("nixl", plugin="GDS", file_storage_path=_path(self._text("weka_path")))

    def _cufile_buffer_size(self) -> str:
        if not {"gds_path", "weka_path"} & set(self._values):
            return "nothing: there is no gds_path"
        return self._store("nixl", buffer_size=int(self._number("cufile_buffer_size")) * _MIB)

    def _enable_kv_events(self) -> str:
        if not require_bool("enable_kv_events", self._values["enable_kv_events"]):
            return "nothing: they are off"
        return self._set("kv_events_config", {"publisher": "zmq"})

    def _internal_api_server_port_start(self) -> str:
        return self._admin_port("internal_api_server")

    def _cache_engine_internal_api_server_port_start(self) -> str:
        return self._admin_port("cache_engine_internal_api_server")

    def _admin_port(self, name: str) -> str:
        if not self._values.get(f"{name}_enabled"):
            return "nothing: it is off"
        return self._set("admin_port", int(self._number(f"{name}_port_start")))

    def _log_level(self) -> str:
        name = self._text("log_level").lower()
        known = {
            "debug": "debug",
            "info": "info",
            "warning": "warning",
            "error": "error",
            "critical": "error",
        }
        if name not in known:
            raise ConfigError(f"log_level: {name!r:.40} is not known; known: {', '.join(known)}")
        return self._set("log_level", known[name])

    # -- keys of extra_config -----------------------------------------------------------

    def _of_store(self, backend: str, ours: str, value: Any) -> str:
        return (
            self._store(backend, **{ours: value})
            if backend in self._stores
            else f"nothing: there is no {backend}"
        )

    def _extra_use_odirect(self) -> str:
        return self._of_store("disk", "direct_io", "on" if self._extra.get("use_odirect") else "auto")

    def _extra_use_direct_io(self) -> str:
        return self._of_store("disk", "direct_io", "on" if self._extra["use_direct_io"] else "auto")

    def _extra_use_cufile(self) -> str:
        return self._of_store("nixl", "plugin", "GDS" if self._extra["use_cufile"] else "POSIX")

    def _extra_ping_interval(self) -> str:
        return self._put(
            "breaker_retry_s", require_number("extra_config.ping_interval", self._extra["ping_interval"])
        )

    def _extra_aws_access_key_id(self) -> str:
        return self._of_store("s3", "access_key_id_env", "AWS_ACCESS_KEY_ID")

    def _extra_aws_secret_access_key(self) -> str:
        return self._of_store("s3", "secret_access_key_env", "AWS_SECRET_ACCESS_KEY")


_AS_THEY_ARE = {
    key.name: (backend, ours)
    for key in EXTRA_KEYS.values()
    for backend, _, ours in (to.partition(".") for to in key.to)
    if backend in ("mooncake", "s3") and not ours.endswith("_env")
}


def _split(text: str) -> SplitResult:
    """ConfigError that repeats nothing of it: it may have a password."""
    try:
        return urlsplit(text)
    except ValueError:
        raise ConfigError("remote_url: is no URL that can be read") from None


def _without_login(text: str) -> SplitResult:
    parts = _split(text)
    if "@" in parts.netloc:
        raise ConfigError("remote_url: this store takes no name and password in its URL")
    return parts


def _path(text: str) -> str:
    return text.removeprefix("file://") if text.startswith("file://") else text


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)
