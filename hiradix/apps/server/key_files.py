"""Keys of the server: each is said as it is or by a file of it; and the file of keys by tenant."""

from __future__ import annotations

import json
import re

from hiradix.config_files import checked_key, read_secret_file
from hiradix.errors import ConfigError
from hiradix.sources import Resolved

MAX_KEYS = 10_000
_COMMENT = re.compile(r"(^|\s)#.*")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,63}")


def choose_key(found: Resolved, name: str) -> tuple[str | None, tuple[str, ...]]:
    """The key that the setting `name` says, or the file of `name`_file: whichever is said sooner (flags, then
    the environment, then the file of settings); and notes of what is not used.

    Raises ConfigError where both are said by the same source, or what is said is no key.
    """
    both = [one for one in (name, f"{name}_file") if one in found.given]
    if not both:
        return None, ()
    first, *rest = sorted(both, key=found.source)
    if rest and found.source(rest[0]) == found.source(first):
        one, other = (found.table[setting].flag for setting in both)
        raise ConfigError(f"{one} and {other} exclude each other: give one")
    where = found.where(first)
    unused = [found.where(other) for other in rest]
    unused += [given.place for other in both for given in found.overruled.get(other, ())]
    notes = tuple(f"{where} is given: {place} is not used" for place in unused)
    if first == name:
        return checked_key(where, found[name]), notes
    text, more = read_secret_file(where, found[first])
    return checked_key(f"{where} {found[first]}", text.strip()), notes + more


def read_tenants(flag: str, path: str) -> tuple[dict[str, str | None], tuple[str, ...]]:
    """Tenants by key, and notes. None: a key whose requests belong to no tenant.

    A JSON object of names by key (null for none), or lines of a key and a name (or a key alone) with space
    between; `#` begins a comment at a line's start or behind space, else it is a key's. Raises ConfigError
    that shows no key.
    """
    text, notes = read_secret_file(flag, path)
    where = f"{flag} {path}"
    found: dict[str, str | None] = {}
    for place, key, tenant in _pairs(where, text):
        checked_key(f"{where}: {place}", key)
        if tenant is not None and (not isinstance(tenant, str) or _TENANT.fullmatch(tenant) is None):
            raise ConfigError(f"{where}: {place}: a tenant is 1 to 64 of A-Z a-z 0-9 . _ -")
        if key in found:
            raise ConfigError(f"{where}: {place}: the key is there twice")
        found[key] = tenant
    if not found or len(found) > MAX_KEYS:
        raise ConfigError(f"{where}: has {len(found)} keys, expected 1 to {MAX_KEYS}")
    return found, notes


def _pairs(where: str, text: str) -> list[tuple[str, str, object]]:
    """The entries of a key file: their place, the key and its tenant."""
    if _is_json_list(text):  # lines of it would be taken for keys: the bracket by itself, too
        raise ConfigError(f"{where}: is a JSON array, expected an object of tenants by key, or lines")
    if text.lstrip().startswith("{"):
        try:
            pairs = json.loads(text, object_pairs_hook=list)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where}: begins as JSON, and is none") from None
        return [(f"entry {number}", key, tenant) for number, (key, tenant) in enumerate(pairs, 1)]
    found: list[tuple[str, str, object]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = _COMMENT.sub("", line).split()
        if len(words) > 2:
            raise ConfigError(f"{where}: line {number}: expected a key and a tenant")
        if words:
            found.append((f"line {number}", words[0], words[1] if len(words) == 2 else None))
    return found


def _is_json_list(text: str) -> bool:
    try:
        return text.lstrip().startswith("[") and isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        return False
