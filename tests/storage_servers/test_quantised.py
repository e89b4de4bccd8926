"""Pages stored as fp8 codes on real servers, alone and compressed or encrypted as well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hiradix.storage import open_storage
from tests.storage.test_quantise import assert_served, context, got, put, values_of
from tests.storage_servers.servers import Server, mooncake_master, prefix_of, redis_keys, s3_keys

MORE: dict[str, dict[str, Any]] = {
    "alone": {},
    "compressed": {"compression": "zstd"},
    "encrypted": {"encryption_key_file": "key"},
    "both": {"compression": "zstd", "encryption_key_file": "key"},
}
LENGTH_KEPT = ["alone", "encrypted"]


def more(name: str, folder: Path) -> dict[str, Any]:
    (folder / "key").write_bytes(bytes(range(32)))
    found = dict(MORE[name])
    return found | ({"encryption_key_file": str(folder / "key")} if "encryption_key_file" in found else {})


def assert_quantised(name: str, keys: dict[str, Any]) -> None:
    """Another handle reads them; exact pages of the same names are others."""
    keys = {"deadline_s": 60.0, **keys}
    values = [values_of(seed) for seed in range(12)]
    first = open_storage(name, context(keys | {"quantise": "fp8"}))
    assert all(put(first, values))
    second = open_storage(name, context(keys | {"quantise": "fp8"}))
    assert_served(second, values)
    exact = open_storage(name, context(keys))
    assert got(exact, values) == [None] * len(values)
    for store in (exact, second, first):
        store.close()


@pytest.mark.parametrize("wrapping", MORE)
@pytest.mark.parametrize("zero_copy", [True, False])
def test_redis_and_valkey(redis_server: Server, tmp_path: Path, zero_copy: bool, wrapping: str) -> None:
    keys = {**redis_keys(redis_server), "key_prefix": prefix_of(tmp_path)}
    assert_quantised("redis", {**keys, "zero_copy": zero_copy, **more(wrapping, tmp_path)})


@pytest.mark.parametrize("wrapping", MORE)
def test_s3(s3_server: Server, tmp_path: Path, wrapping: str) -> None:
    keys = s3_keys(s3_server, prefix_of(tmp_path))
    assert_quantised("s3", {**keys, "max_size": "64MiB", **more(wrapping, tmp_path)})


@pytest.mark.parametrize("wrapping", LENGTH_KEPT)
@pytest.mark.parametrize("name", ["nixl", "tier"])
def test_on_this_host(tmp_path: Path, name: str, wrapping: str) -> None:
    disk = {"disk_storage_path": str(tmp_path / "disk"), "max_size": 16 << 20, "min_free_space": 0}
    file = {"file_storage_path": str(tmp_path / "file"), "min_free_space": 0}
    patient = {"deadline_s": 30.0}
    tier = {"upper": {"backend": "disk", **disk, **patient}, "lower": {"backend": "file", **file, **patient}}
    keys = {"nixl": {**file, "buffer_size": "1MiB"}, "tier": tier}[name]
    assert_quantised(name, {**keys, **more(wrapping, tmp_path)})


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with mooncake_master(tmp_path_factory.mktemp("mooncake")) as server:
        yield server


@pytest.mark.parametrize("wrapping", LENGTH_KEPT)
def test_mooncake(master: Server, tmp_path: Path, wrapping: str) -> None:
    keys = {"master_server_address": f"127.0.0.1:{master.port}", "key_prefix": prefix_of(tmp_path)}
    sizes = {"global_segment_size": "64MiB", "buffer_size": "1MiB"}
    assert_quantised("mooncake", {**keys, **sizes, **more(wrapping, tmp_path)})
