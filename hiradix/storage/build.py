"""A guarded backend from a name and its keys."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from hiradix.errors import ConfigError, Unreachable
from hiradix.storage.guard.breaker import BreakerLimits
from hiradix.storage.guard.guard import GuardedStorage, GuardLimits
from hiradix.storage.guard.joining import Joiner, JoiningStorage, JoinLimits, StoragePart, opened
from hiradix.storage.guard.not_joined import NotJoined
from hiradix.storage.identities import remember
from hiradix.storage.kit.lanes import LEFT_BEHIND
from hiradix.storage.kit.options import MAX_TIMEOUT_S, Options
from hiradix.storage.protocol import StorageBackend, StorageContext, Traits
from hiradix.storage.registry import FLAG, create_storage_backend, load_storage_backend
from hiradix.storage.wrappers.quota import with_quota
from hiradix.storage.wrappers.wrap import WRAP_KEYS, WrapConfig, coded, inner_context, wrap

GUARD_KEYS = (
    "deadline_s",
    "bytes_per_s",
    "num_workers",
    "staging_size",
    "breaker_failures",
    "breaker_retry_s",
    "breaker_retry_max_s",
    "admin_timeout_s",
    "join_timeout_s",
    "join_retry_s",
)


MAX_LEFT_BEHIND = 64
"""Threads in calls of closed stores: one that hangs and is attached again and again leaves more each time."""


def guard_limits(values: Mapping[str, Any]) -> GuardLimits:
    """The guard's own keys out of a backend's; others are not looked at. Raises ConfigError naming the key.
    """
    options, default = Options(values), GuardLimits()
    join_limits(values)
    return GuardLimits(
        deadline_s=options.seconds("deadline_s", default.deadline_s, 0.001, MAX_TIMEOUT_S),
        bytes_per_s=options.number("bytes_per_s", default.bytes_per_s, 1.0),
        num_workers=options.integer("num_workers", default.num_workers, 1),
        staging_bytes=options.size("staging_size", default.staging_bytes),
        checksum=options.boolean("checksum", default.checksum),
        breaker=BreakerLimits(
            failures_to_open=options.integer("breaker_failures", default.breaker.failures_to_open, 1),
            retry_after_s=options.seconds("breaker_retry_s", default.breaker.retry_after_s),
            retry_max_s=options.seconds("breaker_retry_max_s", default.breaker.retry_max_s),
        ),
        admin_timeout_s=options.seconds("admin_timeout_s", default.admin_timeout_s, 0.001, MAX_TIMEOUT_S),
    )


def join_limits(values: Mapping[str, Any]) -> JoinLimits:
    """How a store that does not answer is joined, out of a backend's keys. Raises ConfigError."""
    options, default = Options(values), JoinLimits()
    return JoinLimits(
        timeout_s=options.seconds("join_timeout_s", default.timeout_s, 0.001, MAX_TIMEOUT_S),
        retry_s=options.seconds("join_retry_s", default.retry_s, 0.001, MAX_TIMEOUT_S),
    )


def backend_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The backend's own keys: what guard and wrappers read is left out."""
    return {key: value for key, value in values.items() if key not in (*GUARD_KEYS, *WRAP_KEYS)}


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
    if context.required:
        return open_guarded(name, context, clock)
    _check_left_behind(name)
    found = opened(
        name, lambda: open_guarded(name, context, clock), join_limits(context.extra_config),
        declared_traits(name),
    )  # fmt: skip
    return JoiningStorage(found) if isinstance(found, Joiner) else found.parts[0]


def open_guarded(name: str, context: StorageContext, clock: Callable[[], float]) -> GuardedStorage:
    """The same at once, whatever the context says: Unreachable where the store does not answer."""
    _check_left_behind(name)
    limits, context = guard_limits(context.extra_config), coded(context)
    return GuardedStorage(open_backend(name, context), context.fingerprint, limits, clock, name=name)


def _check_left_behind(name: str) -> None:
    left = LEFT_BEHIND.num_lanes
    if left >= MAX_LEFT_BEHIND:
        raise ConfigError(
            f"{FLAG} {name}: {left} threads are in calls of closed stores that have not ended; no store is "
            f"opened until they are fewer than {MAX_LEFT_BEHIND}, or the process is started again"
        )


def open_backend(name: str, context: StorageContext) -> StorageBackend:
    """Backend `name` in the wrappers that its keys ask for, without a guard. Raises ConfigError.

    Unreachable, which is one, where all values are right as far as can be told without the store. context: as
    `coded` has it.
    """
    wrappers = WrapConfig.from_mapping(context.extra_config)
    rest = backend_keys(context.extra_config)
    inside = dataclasses.replace(inner_context(context, wrappers), extra_config=rest)
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
    """What the class of backend `name` says of all its objects; without that nothing but `ragged`."""
    found = vars(load_storage_backend(name)).get("traits")
    return found if isinstance(found, Traits) else Traits(ragged=ragged)
