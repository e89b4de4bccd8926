"""Full attention and a window in one store of each kind of server: kept apart, read back, cleared as one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hiradix.storage import PageFingerprint, StorageContext, open_storage, open_stores
from tests.storage.test_components import BOTH, FULL, KEYS, check, fill, pages
from tests.storage_servers.servers import Server, mooncake_master, prefix_of, redis_keys, s3_keys

PATIENT = {"deadline_s": 30.0}


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with mooncake_master(tmp_path_factory.mktemp("master")) as server:
        yield server


def assert_kept_apart(name: str, keys: dict[str, Any], survives: bool = True) -> None:
    """survives: closing the store."""
    keys = {**PATIENT, **keys}
    stores = open_stores(name, keys, BOTH)
    assert [part.exists(KEYS) for part in stores.parts] == [0, 0]
    fill(stores)
    assert [part.exists(KEYS) for part in stores.parts] == [len(KEYS)] * 2
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


WRAPPINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compressed": {"compression": "zstd"},
    "encrypted": {"encryption_key_file": "key"},
    "both, absence remembered": {
        "compression": "zstd", "encryption_key_file": "key", "negative_ttl_s": 0.001,
    },
    "with quotas": {"quota": "64MiB", "quota_path": "quotas"},
}  # fmt: skip


def wrapped(name: str, folder: Path) -> dict[str, Any]:
    """Keys of a wrapping; its files are in `folder`."""
    (folder / "key").write_bytes(bytes(range(32)))
    keys = dict(WRAPPINGS[name])
    return {key: str(folder / value) if value in ("key", "quotas") else value for key, value in keys.items()}


LENGTH_KEPT = [name for name, keys in WRAPPINGS.items() if "compression" not in keys]


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("name", ["redis", "valkey"])
def test_redis_and_valkey(redis_server: Server, tmp_path: Path, name: str, wrapping: str) -> None:
    keys = {**redis_keys(redis_server), "key_prefix": prefix_of(tmp_path)}
    assert_kept_apart(name, {**keys, **wrapped(wrapping, tmp_path)})


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_s3(s3_server: Server, tmp_path: Path, wrapping: str) -> None:
    keys = s3_keys(s3_server, prefix_of(tmp_path))
    assert_kept_apart("s3", {**keys, "max_size": "64MiB", **wrapped(wrapping, tmp_path)})


@pytest.mark.parametrize("wrapping", LENGTH_KEPT)
@pytest.mark.parametrize("name", ["file", "disk", "nixl", "tier"])
def test_on_this_host(s3_server: Server, tmp_path: Path, name: str, wrapping: str) -> None:
    """`tier` has its far store on a server."""
    disk = {"disk_storage_path": str(tmp_path / "disk"), "max_size": 16 << 20, "min_free_space": 0}
    file = {"file_storage_path": str(tmp_path / "file"), "min_free_space": 0}
    far = {"backend": "s3", **s3_keys(s3_server, prefix_of(tmp_path)), "max_size": "64MiB", **PATIENT}
    tier = {"upper": {"backend": "disk", **disk, **PATIENT}, "lower": far}
    keys = {"disk": disk, "file": file, "nixl": {**file, "buffer_size": "1MiB"}, "tier": tier}[name]
    assert_kept_apart(name, {**keys, **wrapped(wrapping, tmp_path)})


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


@pytest.mark.parametrize("wrapping", LENGTH_KEPT)
def test_mooncake_wrapped(master: Server, tmp_path: Path, wrapping: str) -> None:
    keys = {"master_server_address": f"127.0.0.1:{master.port}", "key_prefix": prefix_of(tmp_path)}
    sizes = {"global_segment_size": "64MiB", "buffer_size": "1MiB"}
    assert_kept_apart("mooncake", {**keys, **sizes, **wrapped(wrapping, tmp_path)}, survives=False)
