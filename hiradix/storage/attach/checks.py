"""The keys of a store, looked at before it is opened: known, typed and within bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hiradix.errors import ConfigError
from hiradix.settings import REQUIRED, Setting, Type, nearest
from hiradix.storage.attach.tables import BACKEND_SETTINGS
from hiradix.storage.kit.options import flag
from hiradix.storage.opening import COMMON_SETTINGS

_UNKNOWN_KEYS = ("dynamic",)  # their classes have keys of their own


def check_store(backend: str, keys: Mapping[str, Any], within: str = "") -> None:
    """Raises ConfigError naming the first key that is wrong, unknown or missing. Of classes of SGLang's and of
    others nothing is known. within: the key that has this store inside."""
    own = BACKEND_SETTINGS.get(backend)
    if own is None or backend in _UNKNOWN_KEYS:
        return
    known = {**COMMON_SETTINGS, **own}
    for key, value in keys.items():
        where = flag(f"{within}{key}")
        if key not in known:
            hint = nearest(key, known) or f"; known: {', '.join(sorted(known))}"
            raise ConfigError(f"{where} is no key of storage backend {backend}{hint}")
        _check(known[key], where, value, within)
    missing = [one.name for one in own.values() if one.default is REQUIRED and one.name not in keys]
    if missing and backend != "nixl":  # which of its keys are needed, its plugin says
        raise ConfigError(f"{flag(within + missing[0])} is required by storage backend {backend}")


def _check(one: Setting, where: str, value: Any, within: str) -> None:
    if value is None:
        return
    one.check(where, value)
    if one.type is Type.STORE:
        rest = {key: item for key, item in value.items() if key != "backend"}
        check_store(value["backend"], rest, f"{within}{one.name}.")
