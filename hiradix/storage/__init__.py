"""Third tier: pages under opaque keys in files or a remote store. No torch here, and no page is ever trusted.

    open_storage("file", StorageContext(fingerprint, {"file_storage_path": folder}, page_bytes))

gives a `GuardedStorage`, which is what the transfer workers talk to: `Stores` has one for each component of a
cache. `protocol` says what a backend is, `batch` what one call is about.
"""

from __future__ import annotations

from hiradix.storage.batch import Batch
from hiradix.storage.components import ComponentPages, open_stores
from hiradix.storage.fingerprint import PageFingerprint
from hiradix.storage.generations import (
    Generations,
    Trust,
    Witness,
    no_adapters,
    trust_of,
    trusted_stores,
    whole_key,
)
from hiradix.storage.guard.breaker import BreakerLimits, BreakerState
from hiradix.storage.guard.guard import GuardedStorage, GuardLimits
from hiradix.storage.guard.joining import JoiningStorage
from hiradix.storage.guard.stores import PageStore, StoragePart, Stores, WhenJoined
from hiradix.storage.kit.meters import Histogram, MissReason, Op
from hiradix.storage.opening import StoreSettings, open_storage
from hiradix.storage.protocol import BadKey, Page, StorageBackend, StorageContext, Traits, check_key
from hiradix.storage.registry import (
    create_storage_backend,
    load_storage_backend,
    register_storage_backend,
    storage_backend_names,
)

__all__ = [
    "BadKey",
    "Batch",
    "BreakerLimits",
    "BreakerState",
    "ComponentPages",
    "Generations",
    "GuardLimits",
    "GuardedStorage",
    "Histogram",
    "JoiningStorage",
    "MissReason",
    "Op",
    "Page",
    "PageFingerprint",
    "PageStore",
    "StorageBackend",
    "StorageContext",
    "StoragePart",
    "StoreSettings",
    "Stores",
    "Traits",
    "Trust",
    "WhenJoined",
    "Witness",
    "check_key",
    "create_storage_backend",
    "load_storage_backend",
    "no_adapters",
    "open_storage",
    "open_stores",
    "register_storage_backend",
    "storage_backend_names",
    "trust_of",
    "trusted_stores",
    "whole_key",
]
