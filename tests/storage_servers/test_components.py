"""Full attention and a window in one store of each kind of server: kept apart, read back, cleared as one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hiradix.storage import PageFingerprint, StorageContext, open_storage, open_stores
from tests.storage.test_components import BOTH, FULL, KEYS, check, fill, pages
from tests.storage_servers.servers import Server, mooncake_master, prefix_of, s3_keys

PATIENT = {"deadline_s": 30.0}


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with mooncake_master(tmp_path_factory.mktemp("master")) as server:
        yield server


def assert_kept_apart(name: str, keys: dict[str, Any], survives: bool = True) -> None:
    keys = {**PATIENT, **keys}
    stores = open_stores(name, keys, BOTH)
    fill(stores)
    check(stores)
    other = open_storage(name, StorageContext(PageFingerprint("other"), keys, FULL))
    assert all(other.put(KEYS, pages(FULL, 50)))
    if survives:
        stores.close()
        stores = open_stores(name, keys, BOTH)
        check(stores)
    assert stores.clear()
    assert [part.exists(KEYS) for part in stores.parts] == [0, 0]
    assert other.exists(KEYS) == len(KEYS)
    other.clear()
    other.close()
    stores.close()


def test_redis_and_valkey(redis_server: Server, tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{redis_server.port}/0"
    assert_kept_apart("redis", {"url": url, "key_prefix": prefix_of(tmp_path)})


def test_s3(s3_server: Server, tmp_path: Path) -> None:
    assert_kept_apart("s3", {**s3_keys(s3_server, prefix_of(tmp_path)), "max_size": "64MiB"})


def test_a_cap_of_objects_holds_for_all_components(s3_server: Server, tmp_path: Path) -> None:
    """Half of the pages fit, whichever component they are of."""
    keys = {**PATIENT, **s3_keys(s3_server, prefix_of(tmp_path)), "max_size": 4 * (FULL + 1024)}
    stores = open_stores("s3", keys, BOTH)
    for number in range(len(KEYS)):
        for part, num_bytes in zip(stores.parts, (FULL, 1024)):
            part.put([KEYS[number]], pages(num_bytes, 1, 1))
    used = sum(stores.stats()[f"backend_{name}used_bytes"] for name in ("", "window-64_"))
    assert 0 < used <= keys["max_size"]
    stores.close()


def test_mooncake_lends_once(master: Server, tmp_path: Path) -> None:
    keys = {
        "master_server_address": f"127.0.0.1:{master.port}", "global_segment_size": "64MiB",
        "key_prefix": prefix_of(tmp_path), "buffer_size": "1MiB",
    }  # fmt: skip
    stores = open_stores("mooncake", {**PATIENT, **keys}, BOTH)
    figures = stores.stats()
    fill(stores)
    figures = stores.stats()
    assert (figures["backend_lent_bytes"], figures["backend_window-64_lent_bytes"]) == (64 << 20, 0)
    stores.close()
    assert_kept_apart("mooncake", keys, survives=False)


def test_nixl_files(tmp_path: Path) -> None:
    keys = {"file_storage_path": str(tmp_path), "min_free_space": 0, "buffer_size": "1MiB"}
    assert_kept_apart("nixl", keys)


def test_encrypted_files(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(range(32)))
    keys = {"file_storage_path": str(tmp_path / "pages"), "min_free_space": 0}
    assert_kept_apart("file", {**keys, "encryption_key_file": str(tmp_path / "key")})

