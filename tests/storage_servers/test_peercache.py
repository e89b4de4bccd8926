"""A third party's SGLang class as it comes from the package index: peercache, through `dynamic`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hiradix.storage import GuardedStorage, PageFingerprint, StorageContext, open_storage
from tests.contracts.storage import (
    FINGERPRINT,
    PAGE_BYTES,
    QuotaContract,
    StorageContract,
)
from tests.storage_servers.servers import free_port


@pytest.fixture(autouse=True)
def _without_sglang() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("sglang", "peercache")]:
        del sys.modules[name]


class TestPeercache(StorageContract, QuotaContract):
    raises = False
    deletes = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        local = "127.0.0.1"
        keys = {
            "backend_name": "peercache", "module_path": "peercache.store", "class_name": "PeerCacheStore",
            "interface_v1": True, "discovery_addr": f"{local}:{free_port()}", "protocol": "tcp",
            "local_hostname": local, "rdma_bind_host": local, "control_bind_host": local,
            "meta_bind_host": local, "metrics_enabled": False, "disk_enabled": False,
            "global_segment_size": "16mb", "deadline_s": 30.0,
        }  # fmt: skip
        return open_storage("dynamic", StorageContext(fingerprint, keys | config, PAGE_BYTES))
