"""Which settings of storage a request over HTTP may carry, and what each of them can do.

One table per backend. A key that is in none may not be given over HTTP, so a new setting is closed until it
has an entry here; `tests/storage/test_attach_rules.py` compares the tables with what the backends read.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class SettingKind(enum.Enum):
    """What a setting can do."""

    VALUE = "value"  # a number, a switch, a choice: touches nothing outside of the store
    SECRET = "secret"  # text that is shown nowhere
    FOLDER = "folder"  # is written to
    FILE = "file"  # is read
    ADDRESS = "address"  # is connected to
    STORE = "store"  # another backend with settings of its own
    SIZES = "sizes"  # an object of numbers and sizes
    CLOSED = "closed"  # runs code, is handed to a library, or weakens what a hit promises


@dataclass(frozen=True)
class Setting:
    """most: the largest number; closed: values that are refused."""

    kind: SettingKind
    most: float | None = None
    closed: tuple[object, ...] = ()


_VALUE, _SECRET = Setting(SettingKind.VALUE), Setting(SettingKind.SECRET)
_FOLDER, _FILE = Setting(SettingKind.FOLDER), Setting(SettingKind.FILE)
_ADDRESS, _CLOSED = Setting(SettingKind.ADDRESS), Setting(SettingKind.CLOSED)
_GIB = float(1 << 30)
_WEAKER = Setting(SettingKind.VALUE, closed=(False,))

CACHE_KEYS = {
    "prefetch_threshold": _VALUE,
    "prefetch_timeout_base": _VALUE,
    "prefetch_timeout_per_ki_token": _VALUE,
    "hicache_storage_pass_prefix_keys": _VALUE,
    "hicache_storage_required": _VALUE,
}
"""Keys of the cache itself, at the outermost level only."""

COMMON_KEYS = {
    "deadline_s": _VALUE,
    "bytes_per_s": _VALUE,
    "num_workers": Setting(SettingKind.VALUE, 256),
    "staging_size": Setting(SettingKind.VALUE, _GIB),
    "breaker_failures": _VALUE,
    "breaker_retry_s": _VALUE,
    "breaker_retry_max_s": _VALUE,
    "join_retry_s": _VALUE,
    "join_timeout_s": _VALUE,
    "admin_timeout_s": _VALUE,
    "checksum": _WEAKER,
    "retries": _VALUE,
    "retry_wait_s": _VALUE,
    "negative_ttl_s": _VALUE,
    "compression": _VALUE,
    "compression_level": _VALUE,
    "quantise": Setting(SettingKind.VALUE, closed=("fp8",)),
    "encryption_key_file": _FILE,
    "quota": _VALUE,
    "quotas": Setting(SettingKind.SIZES),
    "quota_path": _FOLDER,
}

_FILES = {
    "file_storage_path": _FOLDER,
    "max_size": _VALUE,
    "min_free_space": _VALUE,
    "touch_interval_s": _VALUE,
    "lock_timeout_s": _VALUE,
    "fsync": _VALUE,
    "enable_metadata_cache": _VALUE,
    "metadata_ttl": _VALUE,
    "eviction_ratio": _VALUE,
}
_DISK = {
    "disk_storage_path": _FOLDER,
    "max_size": _VALUE,
    "min_free_space": _VALUE,
    "segment_size": _VALUE,
    "verify": Setting(SettingKind.VALUE, closed=("recovered", "off")),
    "io_engine": _VALUE,
    "direct_io": _VALUE,
    "direct_writes": _VALUE,
    "use_page_cache": _VALUE,
    "io_threads": Setting(SettingKind.VALUE, 256),
    "touch_interval_s": _VALUE,
    "lock_timeout_s": _VALUE,
    "fsync": _VALUE,
}
_REDIS = {
    "url": _ADDRESS,
    "username": _SECRET,
    "password": _SECRET,
    "password_file": _FILE,
    "tls_ca_file": _FILE,
    "tls_cert_file": _FILE,
    "tls_key_file": _FILE,
    "sentinels": _ADDRESS,
    "sentinel_service": _VALUE,
    "sentinel_password": _SECRET,
    "sentinel_tls": _VALUE,
    "cluster": _VALUE,
    "key_prefix": _VALUE,
    "ttl_s": _VALUE,
    "timeout_s": _VALUE,
    "connect_timeout_s": _VALUE,
    "zero_copy": _VALUE,
}
_S3 = {
    "url": _ADDRESS,
    "endpoint": _ADDRESS,
    "region": _ADDRESS,  # a part of the host's name
    "access_key_id": _SECRET,
    "secret_access_key": _SECRET,
    "session_token": _SECRET,
    "store_options": _CLOSED,
    "max_size": _VALUE,
    "timeout_s": _VALUE,
    "connect_timeout_s": _VALUE,
    "request_retries": Setting(SettingKind.VALUE, 100),
    "retry_timeout_s": _VALUE,
    "num_connections": Setting(SettingKind.VALUE, 256),
}
_MOONCAKE = {
    "master_server_address": _ADDRESS,
    "metadata_server": _ADDRESS,
    "local_hostname": _ADDRESS,
    "global_segment_size": Setting(SettingKind.VALUE, 64 * _GIB),
    "buffer_size": Setting(SettingKind.VALUE, _GIB),
    "protocol": _VALUE,
    "device_name": _CLOSED,
    "tenant_id": _VALUE,
    "replica_num": _VALUE,
    "timeout_s": _VALUE,
    "key_prefix": _VALUE,
    "zero_copy": _VALUE,
    "check_server": _VALUE,
    "master_metrics_port": _VALUE,
}
_NIXL = {
    "plugin": _VALUE,
    "plugin_options": _CLOSED,
    "buffer_size": Setting(SettingKind.VALUE, _GIB),
    "zero_copy": _VALUE,
}

SETTINGS: Mapping[str, Mapping[str, Setting]] = {
    "disk": _DISK,
    # a file of `sglang` naming says nothing of whose page it is: whatever has the right length is believed
    "file": _FILES | dict.fromkeys(("naming", "sglang_model_name", "is_mla_model"), _CLOSED),
    "redis": _REDIS,
    "valkey": _REDIS,
    "s3": _S3,
    "mooncake": _MOONCAKE,
    "nixl": _NIXL | _FILES | _S3,
    "tier": {"upper": Setting(SettingKind.STORE), "lower": Setting(SettingKind.STORE), "promote": _VALUE},
}
"""Backends that rules can permit. Others run code of others, or with settings that nobody here knows."""

CLOSED_BACKENDS = "use --attachable: what its settings can do is not known here"


def settings_of(backend: str, is_outermost: bool) -> Mapping[str, Setting]:
    """All keys that `backend` takes, by name; none for a backend that no rule can permit."""
    own = SETTINGS.get(backend)
    if own is None:
        return {}
    return {**COMMON_KEYS, **own, **(CACHE_KEYS if is_outermost else {})}


KNOWN_KEYS = frozenset(
    {*CACHE_KEYS, *COMMON_KEYS, *(key for keys in SETTINGS.values() for key in keys), "backend"}
    | {"naming", "module_path", "class_name", "backend_name", "interface_v1"}
)
"""Names that an answer may repeat: of no request's making."""
