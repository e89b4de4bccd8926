"""All settings there are, by name: of the server, of a store, inside vLLM and SGLang; and where each is said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hiradix.adapters.sglang import settings as sglang_settings
from hiradix.adapters.vllm import settings as vllm_settings
from hiradix.apps.lmcache.keys import EXTRA_KEYS, KEYS, LMCacheKey
from hiradix.apps.server.flag_table import FLAGS, Flag
from hiradix.config import SECRET_KEYS
from hiradix.errors import ConfigError
from hiradix.settings import (
    NUMBERS,
    PREFIX,
    Setting,
    Type,
    nearest,
    settings_of,
    shown_default,
    shown_values,
)
from hiradix.storage.attach.tables import BACKEND_SETTINGS, CACHE_SETTINGS, shown_over_http
from hiradix.storage.opening import COMMON_SETTINGS

EXTRA = "hicache_storage_backend_extra_config"
_SERVER = "hiradix serve"
_VLLM = {one.name for one in settings_of(vllm_settings.Settings)} | set(vllm_settings.CONFIG_KEYS)


@dataclass(frozen=True)
class CatalogueEntry:
    """A setting and its owner. said: by place, how it is said there."""

    one: Setting
    owner: str
    said: Mapping[str, str]
    status: str = "implemented"

    def as_json(self) -> dict[str, Any]:
        """The entry as a JSON object."""
        one = self.one
        found: dict[str, Any] = {
            "name": one.name, "owner": self.owner, "status": self.status, "type": one.type.value,
            "default": shown_default(one).replace("`", ""), "text": one.text, "said": dict(self.said),
            "aliases": list(one.aliases), "over_http": shown_over_http(one).replace("`", ""),
        }  # fmt: skip
        if one.choices:
            found |= {"choices": list(one.choices), "refused": dict(one.refused)}
        if one.type in NUMBERS:
            found |= {"minimum": one.minimum, "maximum": one.maximum}
        return found

    def lines(self) -> Iterator[str]:
        """The entry as lines of text for people."""
        one = self.one
        default = shown_default(one).replace("`", "")
        values = shown_values(one).replace("`", "")
        yield f"{one.name}  ({self.owner}{'' if self.status == 'implemented' else ', ' + self.status})"
        yield f"  {one.text.replace('`', '')}"
        if self.status == "refused":
            return
        rows = {"values": values, "default": "off" if one.type is Type.BOOL and not one.default else default}
        rows |= dict(self.said)
        if one.aliases:
            rows["also called"] = ", ".join(one.aliases)
        rows["over HTTP"] = shown_over_http(one).replace("`", "")
        for name, text in rows.items():
            yield f"  {name:<12} {text}"
        for choice, reason in one.refused.items():
            yield f"  {'refused':<12} {choice}: {reason}"


def _of_flag(flag: Flag) -> CatalogueEntry:
    one = flag.setting
    if flag.status == "refused":
        return CatalogueEntry(one, _SERVER, {}, flag.status)
    said = {"flag": ", ".join((flag.name, *flag.aliases)), "variable": one.variable, "file": one.name}
    if one.name in _VLLM:
        said["vLLM"] = f"kv_connector_extra_config: {one.name}"
    place = sglang_settings.place_of(one)
    if place:
        said["SGLang"] = place
    return CatalogueEntry(one, _SERVER, said, flag.status)


def _of_vllm(one: Setting) -> CatalogueEntry:
    said = {"vLLM": f"kv_connector_extra_config: {one.name}", "variable": one.variable, "file": one.name}
    return CatalogueEntry(one, "vLLM", said)


def _of_store(one: Setting, owner: str) -> CatalogueEntry:
    said = {"key": f"{EXTRA}: {one.name}"}
    if one.name in SECRET_KEYS:
        said["variable"] = f"the one that {one.name}_env names"
    return CatalogueEntry(one, owner, said)


def known() -> list[CatalogueEntry]:
    """All of them."""
    found = [_of_flag(flag) for flag in FLAGS]
    found += [_of_vllm(one) for one in vllm_settings.own_settings()]
    found += [_of_store(one, "storage, of the cache") for one in CACHE_SETTINGS.values()]
    found += [_of_store(one, "storage, of every backend") for one in COMMON_SETTINGS.values()]
    for backend, table in BACKEND_SETTINGS.items():
        if backend != "valkey":
            own = (one for one in table.values() if one.name not in COMMON_SETTINGS)
            found += [_of_store(one, f"storage, of {backend}") for one in own]
    return found


def _names(entry: CatalogueEntry) -> set[str]:
    one = entry.one
    found = {one.name, *one.aliases, entry.said.get("variable", "").removeprefix(PREFIX).lower()}
    if entry.owner.startswith("storage, of "):
        found.add(f"{entry.owner.removeprefix('storage, of ')}.{one.name}")
    return found


def explained(name: str) -> list[CatalogueEntry | LMCacheKey]:
    """The entries with this name: of a setting, a flag, a variable, a key such as `disk.max_size`, or a key
    of LMCache's. Raises ConfigError with the nearest name there is."""
    wanted = name.removeprefix("--").replace("-", "_").removeprefix(PREFIX)
    wanted = wanted.lower() if wanted.isupper() else wanted
    entries = known()
    found: list[CatalogueEntry | LMCacheKey] = [entry for entry in entries if wanted in _names(entry)]
    if not found:
        found += [table[wanted] for table in (KEYS, EXTRA_KEYS) if wanted in table]
    if not found:
        names = {one for entry in entries for one in _names(entry)} - {""}
        raise ConfigError(f"{name:.80} is no setting{nearest(wanted, names)}")
    return found
