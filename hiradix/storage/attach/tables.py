"""All keys of storage by backend: for what a request over HTTP may carry, and for `docs/storage-keys.md`.

A key that is in no table may not be given over HTTP, nor one whose setting does not say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hiradix.config import SECRET_KEYS, ExtraConfig
from hiradix.settings import Setting, Type, settings_of, shown_default, shown_size, shown_values
from hiradix.storage.backends.disk.config import DiskConfig
from hiradix.storage.backends.file.config import FileConfig
from hiradix.storage.backends.mooncake.config import MooncakeConfig
from hiradix.storage.backends.nixl.config import NixlConfig
from hiradix.storage.backends.redis.config import RedisConfig
from hiradix.storage.backends.s3.config import S3Config
from hiradix.storage.backends.sglang.files import SglangNaming
from hiradix.storage.backends.sglang.host import DYNAMIC_SETTINGS
from hiradix.storage.backends.tier.backend import TierConfig
from hiradix.storage.opening import COMMON_SETTINGS


def _by_name(table: Iterable[Setting]) -> dict[str, Setting]:
    return {one.name: one for one in table}


CACHE_SETTINGS = _by_name(settings_of(ExtraConfig))
"""Keys of the cache itself, at the outermost level only."""
_FILE, _S3 = _by_name(settings_of(FileConfig)), _by_name(settings_of(S3Config))
_NIXL, _REDIS = _by_name(settings_of(NixlConfig)), _by_name(settings_of(RedisConfig))
BACKEND_SETTINGS: Mapping[str, Mapping[str, Setting]] = {
    "disk": _by_name(settings_of(DiskConfig)),
    "file": _FILE | _by_name(settings_of(SglangNaming)),
    "redis": _REDIS,
    "valkey": _REDIS,
    "s3": _S3,
    "mooncake": _by_name(settings_of(MooncakeConfig)),
    "nixl": _NIXL | _FILE | _S3,
    "tier": _by_name(settings_of(TierConfig)),
    "dynamic": _by_name(DYNAMIC_SETTINGS),
}
"""The backends' own keys. What classes of SGLang and of others read is not known here."""

PERMITTABLE = tuple(
    name for name, table in BACKEND_SETTINGS.items() if any(one.over_http for one in table.values())
)
"""Backends that a rule can permit over HTTP. The others run code of others."""
KNOWN_KEYS = frozenset({"backend"}.union(CACHE_SETTINGS, COMMON_SETTINGS, *BACKEND_SETTINGS.values()))
"""Names that an answer may repeat: of no request's making."""


def settings_over_http(backend: str, is_outermost: bool) -> Mapping[str, Setting]:
    """The settings that a request for `backend` may carry, by name; none where no rule can permit it."""
    if backend not in PERMITTABLE:
        return {}
    tables = [COMMON_SETTINGS, BACKEND_SETTINGS[backend], CACHE_SETTINGS if is_outermost else {}]
    return {name: one for table in tables for name, one in table.items() if one.over_http is not None}


_HEADER = ("| key | values | default | over HTTP | meaning |", "|---|---|---|---|---|")


def storage_keys_markdown() -> str:
    """The tables of `docs/storage-keys.md`."""
    sections: dict[str, Mapping[str, Setting]]
    sections = {"Of the cache itself": CACHE_SETTINGS, "Of every backend": COMMON_SETTINGS}
    own = {**BACKEND_SETTINGS, "nixl": _NIXL}
    sections |= {f"Of `{name}`": own[name] for name in own if name != "valkey"}  # as of redis
    lines: list[str] = []
    for title, table in sections.items():
        lines += [f"## {title}", "", *_HEADER]
        rows = (one for one in table.values() if table is COMMON_SETTINGS or one.name not in COMMON_SETTINGS)
        lines += [*map(_row, rows), ""]
    return "\n".join(lines)


def _row(one: Setting) -> str:
    text = one.text
    if one.name in SECRET_KEYS:
        text += f"; or `{one.name}_env`, the name of an environment variable"
    cells = (f"`{one.name}`", shown_values(one), shown_default(one), shown_over_http(one), text)
    return "| " + " | ".join(cells) + " |"


def shown_over_http(one: Setting) -> str:
    if one.over_http is None:
        return "never"
    if one.type in (Type.FOLDER, Type.FILE, Type.ADDRESS, Type.STORE):
        return "as a rule permits"
    if (most := one.over_http.most) is not None:
        return f"at most {shown_size(int(most)) if one.type is Type.SIZE else f'{most:g}'}"
    refused = ", ".join(f"`{str(value).lower()}`" for value in one.over_http.refused)
    return f"not {refused}" if refused else "yes"
