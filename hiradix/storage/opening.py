"""A guarded backend from a name and its keys."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hiradix.errors import ConfigError, Unreachable
from hiradix.settings import read, settings_of
from hiradix.storage.guard.guard import GuardedStorage, GuardLimits
from hiradix.storage.guard.joining import Joiner, JoiningStorage, JoinLimits, opened
from hiradix.storage.guard.not_joined import NotJoined
from hiradix.storage.guard.stores import StoragePart, Stores
from hiradix.storage.identities import remember
from hiradix.storage.kit.call_threads import ABANDONED
from hiradix.storage.kit.options import CHECKSUM, flag
from hiradix.storage.protocol import StorageBackend, StorageContext, Traits
from hiradix.storage.registry import FLAG, create_storage_backend, load_storage_backend
from hiradix.storage.wrappers.quota import with_quota
from hiradix.storage.wrappers.wrap import WrapConfig, coded, inner_context, wrap

MAX_ABANDONED = 64
"""Threads in calls of closed stores: one that hangs and is attached again and again leaves more each time."""


@dataclass(frozen=True)
class StoreSettings:
    """The keys of a store, read once: of guard, joiner and wrappers; `own` are the backend's, unread."""

    guard: GuardLimits
    join: JoinLimits
    wraps: WrapConfig
    own: Mapping[str, Any] = field(repr=False)

    @staticmethod
    def read(keys: Mapping[str, Any] | StoreSettings) -> StoreSettings:
        """Raises ConfigError naming the bad key; those of the backend are not looked at."""
        if isinstance(keys, StoreSettings):
            return keys
        return StoreSettings(
            read(GuardLimits, keys, flag), read(JoinLimits, keys, flag), WrapConfig.from_mapping(keys),
            backend_keys(keys),
        )  # fmt: skip


_COMMON = (GuardLimits, JoinLimits, WrapConfig)
COMMON_SETTINGS = {one.name: one for part in _COMMON for one in settings_of(part)}
"""Keys of every backend."""


def backend_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The backend's own keys, without those of guard, joiner and wrappers, but with `checksum`."""
    return {key: value for key, value in keys.items() if key not in COMMON_SETTINGS or key == CHECKSUM.name}


def open_storage(
    name: str, context: StorageContext, clock: Callable[[], float] = time.monotonic
) -> StoragePart:
    """Backend `name`, made from the context's keys and wrapped in its guard. Raises ConfigError.

    Where the context does not require the store, one that does not answer is no error: see `joining`.

    >>> import tempfile
    >>> from hiradix.storage.fingerprint import PageFingerprint
    >>> folder = tempfile.TemporaryDirectory()
    >>> keys = {"disk_storage_path": folder.name, "max_size": "16MiB"}
    >>> store = open_storage("disk", StorageContext(PageFingerprint("my-model"), keys, page_bytes=4096))
    >>> store.put(["a"], [[memoryview(bytes(4096))]]), store.exists(["a", "b"])
    ([True], 1)
    >>> page = memoryview(bytearray(4096))
    >>> store.get(["a", "b"], [[page], [page]])
    [True, False]
    >>> store.close()
    >>> folder.cleanup()
    """
    settings = StoreSettings.read(context.extra_config)
    own = dataclasses.replace(context, extra_config=settings.own)
    return open_part(name, coded(own, settings.wraps), settings, clock)


def open_part(
    name: str, context: StorageContext, settings: StoreSettings, clock: Callable[[], float]
) -> StoragePart:
    """Open a store whose keys have been parsed: the context has the backend's own, and is `coded`; otherwise
    like `open_storage`."""
    if context.required:
        return open_guarded(name, context, settings, clock)
    _check_abandoned(name)
    found = opened(
        name, lambda: Stores([open_guarded(name, context, settings, clock)]), settings.join,
        declared_traits(name),
    )  # fmt: skip
    return JoiningStorage(found) if isinstance(found, Joiner) else found.guards[0]


def open_guarded(
    name: str, context: StorageContext, settings: StoreSettings, clock: Callable[[], float]
) -> GuardedStorage:
    """The same at once, whatever the context says: Unreachable where the store does not answer."""
    _check_abandoned(name)
    backend = open_backend(name, context, settings.wraps)
    return GuardedStorage(backend, context.fingerprint, settings.guard, clock, name=name)


def _check_abandoned(name: str) -> None:
    number = ABANDONED.num_threads
    if number >= MAX_ABANDONED:
        raise ConfigError(
            f"{FLAG} {name}: {number} threads are in calls of closed stores that have not ended; no store is "
            f"opened until they are fewer than {MAX_ABANDONED}, or the process is started again"
        )


def open_backend(name: str, context: StorageContext, wrappers: WrapConfig) -> StorageBackend:
    """Backend `name` in `wrappers`, without a guard. Raises ConfigError.

    Unreachable, which is one, where all values are right as far as can be told without the store. context: as
    `open_part` has it.
    """
    inside = inner_context(context, wrappers)
    try:
        made = create_storage_backend(name, inside)
    except Unreachable:
        stand_in = NotJoined(declared_traits(name, ragged=True))
        with_quota(wrap(stand_in, inside, wrappers), name, context.fingerprint, wrappers.quota).close()
        raise
    backend = wrap(made, inside, wrappers)
    backend = with_quota(backend, name, context.fingerprint, wrappers.quota)
    remember(context.fingerprint)
    return backend


def declared_traits(name: str, ragged: bool = False) -> Traits:
    """The traits that the class of backend `name` declares for all its objects; else none but `ragged`."""
    found = vars(load_storage_backend(name)).get("traits")
    return found if isinstance(found, Traits) else Traits(ragged=ragged)
